"""Atomic and durable writing of files, and the space left on a disk."""

import errno
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from invrl.errors import DiskFullError

FULL_BYTES = 16_000_000
"""A disk with less free space counts as full: SQLite's log and a few log lines need
this much."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path to write a file to that replaces the one at `path` at the end of
    the block: a reader sees the old content or the new one, never a part of it. After
    an OSError the old one stays alone."""
    new = path.with_name(path.name + ".new")
    try:
        yield new
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` as `replacing` does."""
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Force a file's contents, or a folder's names, to disk: they survive a power
    loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Flush the folder and everything below it."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def full_disk(folder: Path) -> str:
    """Describe which disk of `folder` is full, or read-only; "" if it takes files.

    A quota shows only in a write, so a file without a name is given the space.
    """
    try:
        free = shutil.disk_usage(folder).free
        if free < FULL_BYTES:
            return f"the disk at {_mount(folder)} is full: {free / 1e6:.1f} MB are free"
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, FULL_BYTES)
    except OSError as error:
        if error.errno == errno.EDQUOT:
            return f"the quota on the disk at {_mount(folder)} is used up"
        if error.errno == errno.ENOSPC:
            return f"the disk at {_mount(folder)} is full: it takes no more files"
        if error.errno == errno.EROFS:
            return f"the disk at {_mount(folder)} is read-only"
    return ""


def space_left(folder: Path) -> str:
    """Describe which disk the folder is on, and how much is free."""
    free = shutil.disk_usage(folder).free
    return f"the disk at {_mount(folder)} has {free / 1e6:,.1f} MB left"


def _mount(folder: Path) -> Path:
    mount = folder.resolve()
    while not mount.is_mount():
        mount = mount.parent
    return mount


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError unless `num_bytes` fit on the disk of the folder."""
    if shutil.disk_usage(folder).free < num_bytes:
        raise DiskFullError(
            f"{space_left(folder)}, and {num_bytes / 1e6:,.1f} MB are to be written"
        )


def is_full(error: BaseException, folder: Path | None = None) -> bool:
    """Whether a write failed because a disk, or the user's quota on it, is full.
    `folder`: of the file, if it is SQLite's, which reports an I/O error if its shared
    index cannot grow."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, DiskFullError):
            return True
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if isinstance(cause, sqlite3.Error):
            code = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return True
            if code == sqlite3.SQLITE_IOERR and folder is not None:
                return full_disk(folder) != ""
        cause = cause.__cause__ or cause.__context__
    return False
