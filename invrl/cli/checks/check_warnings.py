"""Findings of a check that do not stop a run, unlike a ConfigError."""

from invrl.errors import ConfigError


class CheckWarning(ConfigError):
    """A run may start with this, and may be slow or fail later. `train` and `doctor`
    warn."""


class LikelyFailure(CheckWarning):
    """An estimate says that the run will fail. `train` only warns, because it is an
    estimate; `doctor` reports a failure."""
