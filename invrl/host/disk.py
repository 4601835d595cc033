"""Files that are whole or not there, and what is on disk when a call returns."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path`: a reader sees the old text or the new one, never a part of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def flush(path: Path) -> None:
    """Force a file's contents, or a folder's names, to disk: a power loss after it takes nothing back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """The folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
