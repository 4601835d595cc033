"""The adapter that the engines of a run serve, as SGLang's flags."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter of which an engine holds several versions at a time."""

    rank: int
    targets: tuple[str, ...]
    """Names of the adapted projections."""
    num_versions: int
    """Versions that an engine has memory for."""

    def flags(self, *, on_cpu: bool) -> list[str]:
        """Return SGLang's flags. `--max-loaded-loras` is not among them: SGLang would
        unload versions by itself."""
        flags = [
            "--enable-lora",
            "--max-lora-rank",
            str(self.rank),
            "--max-loras-per-batch",
            str(self.num_versions),
            "--lora-target-modules",
            *self.targets,
        ]
        if on_cpu:
            flags += ["--lora-backend", "torch_native"]
        return flags
