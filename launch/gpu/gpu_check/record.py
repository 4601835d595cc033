"""`gpu.json`: the card, the versions, and what each stage found. Written anew after
every stage."""

import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check.card import card
from gpu_check.stage import Outcome

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "megatron-core",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "ray",
    "sglang-router",
)


@dataclass(slots=True, eq=False)
class Record:
    path: Path
    _outcomes: dict[str, Outcome] = field(default_factory=dict, init=False)

    def add(self, name: str, outcome: Outcome) -> None:
        self._outcomes[name] = outcome
        self.write()

    def write(self) -> None:
        """The file is whole at any time."""
        values = {
            **card(),
            "versions": versions(),
            "stages": {
                name: outcome.as_json() for name, outcome in self._outcomes.items()
            },
        }
        partial = self.path.with_suffix(".part")
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


def versions() -> dict[str, str]:
    """Of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
