"""Folder for data computed from a run for its viewers: in the user's cache, never in
the run."""

import hashlib
import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder below $XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "invrl" / "viewer"


def run_cache_folder(cache: Path, run: Path) -> Path:
    """Return the folder for data computed from the run at this path."""
    digest = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]
    return cache / digest
