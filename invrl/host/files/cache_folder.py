"""Folders in the user's cache: for data computed from a run for its viewers, which is
never in the run, and for the virtual environments of `invrl environment`."""

import hashlib
import os
from pathlib import Path
from typing import Literal


def cache_folder(use: Literal["viewer", "environments"] = "viewer") -> Path:
    """Return the folder below $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "invrl" / use


def run_cache_folder(cache: Path, run: Path) -> Path:
    """Return the folder for data computed from the run at this path."""
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]
    return cache / digest
