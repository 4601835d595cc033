"""The adapters that engines serve, as SGLang's flags."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter of which an engine holds several versions at a time, or several
    adapters that it holds from its start."""

    rank: int
    """The largest of all."""
    targets: tuple[str, ...]
    """Names of the adapted projections."""
    num_versions: int
    """Versions that an engine has memory for; or adapters, and the model without
    one."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """PEFT folders that are loaded at the start, by the adapters' names."""

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
        if self.folders:
            flags.append("--lora-paths")
            for name, folder in self.folders.items():
                fields = {"lora_name": name, "lora_path": str(folder), "pinned": False}
                flags.append(json.dumps(fields))
        if on_cpu:
            flags += ["--lora-backend", "torch_native"]
        return flags
