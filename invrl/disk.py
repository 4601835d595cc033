"""What is on disk when a call returns: a power loss after it takes nothing back."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """A file's contents, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """The folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
