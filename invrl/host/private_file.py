"""Files of a run that only their owner may read, from the moment they exist: keys, conversations, and logs
that may hold either."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

_OWNER_ONLY = 0o600


def open_private(path: Path, *, append: bool = False) -> BinaryIO:
    """For writing, from an empty file or at its end. One that exists becomes private if it is ours."""
    mode = os.O_APPEND if append else os.O_TRUNC
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, _OWNER_ONLY)
    _restrict(file)
    return os.fdopen(file, "wb")


def make_private(path: Path) -> None:
    """An empty file where there is none; one that exists becomes private if it is ours, and stays as it is.
    One that exists is not opened: to close it again would drop every lock that this process has on it, those
    of SQLite too."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY))
    except FileExistsError:
        restrict(path)


def restrict(path: Path) -> None:
    """A file becomes private if it is there and ours."""
    with contextlib.suppress(FileNotFoundError):
        _restrict(path)


def _restrict(file: int | Path) -> None:
    facts = os.stat(file)
    if facts.st_uid == os.geteuid() and facts.st_mode & 0o077:
        os.chmod(file, _OWNER_ONLY)
