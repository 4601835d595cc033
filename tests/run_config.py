"""The configuration of a run with a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from invrl.run.settings.config import Config, Source, resolve


def config(root: Path, name: str | None = None, **train: Any) -> Config:
    return resolve(
        Source(
            name="test",
            tables={"run": {"run_root": str(root), "run_name": name}, "train": train},
        )
    )
