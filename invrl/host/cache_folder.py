"""Where what is computed of a run for those who look at it lies: in the user's cache,
never in the run."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Below $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "invrl" / "viewer"


def folder_of_run(cache: Path, run: Path) -> Path:
    """The folder for what is computed of the run at this path."""
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]
    return cache / digest
