"""What a check raises that does not forbid a run. For what does, it raises ConfigError itself."""

from invrl.errors import ConfigError


class Doubt(ConfigError):
    """A run may start with this, and may be slow or fail later. `train` and `doctor` warn."""


class LikelyFailure(Doubt):
    """An estimate says that the run will fail. `train` warns, as an estimate forbids nothing; `doctor`
    reports a failure."""
