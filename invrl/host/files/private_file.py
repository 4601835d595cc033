"""Files of a run that are readable only by their owner from the moment they exist:
keys, conversations, and logs that may contain either."""

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

_OWNER_ONLY = 0o600


def open_private(path: Path, *, append: bool = False) -> BinaryIO:
    """Open for writing: an empty file, or at its end with `append`. A file of ours
    becomes private."""
    mode = os.O_APPEND if append else os.O_TRUNC
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, _OWNER_ONLY)
    _restrict(file)
    return os.fdopen(file, "wb")


def make_private(path: Path) -> None:
    """Create an empty file, or make an existing file of ours private and leave its
    content.

    An existing file is not opened: closing it again would drop every lock that this
    process has on it, including SQLite's.
    """
    try:
        os.close(
            os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _OWNER_ONLY
            )
        )
    except FileExistsError:
        restrict(path)


def restrict(path: Path) -> None:
    """Make a file private if it exists and is ours."""
    with contextlib.suppress(FileNotFoundError):
        _restrict(path)


def _restrict(file: int | Path) -> None:
    facts = os.stat(file)
    if facts.st_uid == os.geteuid() and facts.st_mode & 0o077:
        os.chmod(file, _OWNER_ONLY)
