"""Files that are whole or not there, what is on disk when a call returns, and whether a
disk is full."""

import os
import shutil
from pathlib import Path

_FULL_BYTES = 16_000_000
"""With less free space a disk counts as full: SQLite's log and a few log lines need as
much."""


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path`: a reader sees the old text or the new one, never a
    part of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def flush(path: Path) -> None:
    """Force a file's contents, or a folder's names, to disk: a power loss after it
    takes nothing back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """The folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def full_disk(folder: Path) -> str:
    """Which disk of `folder` is full and how much of it is free; "" if it is not
    full."""
    free = shutil.disk_usage(folder).free
    if free >= _FULL_BYTES:
        return ""
    mount = folder.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return f"the disk at {mount} is full: {free / 1e6:.1f} MB are free"
