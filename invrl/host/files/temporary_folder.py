"""Folders for files that processes leave in TMPDIR, such as an engine's sockets.

Invariant: a folder has one owner, the process that made it, which locks it as long as
it lives. Its name has the owner's pid. A folder of this user that nobody locks was left
by a killed process; the next command removes it (`remove_abandoned`). The kernel knows
the lock in every container that shares the folder's file system, where a pid alone
could mean another process.
"""

import contextlib
import fcntl
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

_NAME = re.compile(r"invrl-[a-z]+-[0-9]+-[a-z0-9_]{8}")
_SHORT = Path("/tmp")
_LONGEST_PARENT = 24
"""Most characters of the parent's path. A Unix socket's path has at most 107 bytes, and
folders are nested."""
_KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class TemporaryFolder:
    """A new folder, removed with its contents by `remove`, or at the end of a `with`
    block."""

    def __init__(self, kind: str, *, parent: Path | None = None) -> None:
        """`kind`: a word for its name. `parent`: by default TMPDIR, or /tmp if the path
        of TMPDIR is long."""
        if parent is None:
            parent = _short_parent()
        while True:
            self.path = Path(
                tempfile.mkdtemp(prefix=f"invrl-{kind}-{os.getpid()}-", dir=parent)
            )
            lock = _lock(self.path)
            if lock is not None:
                break
            # Another command has just taken it for an abandoned one, and removes it.
        self._lock = lock

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def environment(self) -> Mapping[str, str]:
        """Return the variables that make a process keep its temporary files here.

        Kernels that torch has compiled stay where the next process finds them.
        """
        variables = {"TMPDIR": str(self.path)}
        if _KERNEL_CACHE not in os.environ:
            with contextlib.suppress(KeyError, OSError):  # a user without a name
                user = getpass.getuser()
                variables[_KERNEL_CACHE] = str(
                    Path(tempfile.gettempdir()) / f"torchinductor_{user}"
                )
        return variables

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def short_folder() -> Path:
    """Return /tmp if it can be written, for sockets whose path would be too long in
    TMPDIR."""
    if os.access(_SHORT, os.W_OK):
        return _SHORT
    return Path(tempfile.gettempdir())


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners were killed."""
    for path in _folders():
        lock = _lock(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _short_parent() -> Path:
    parent = tempfile.gettempdir()
    if len(parent) <= _LONGEST_PARENT:
        return Path(parent)
    return short_folder()


def _folders() -> Iterator[Path]:
    """Yield this user's temporary folders, of living and dead owners."""
    for parent in {short_folder(), _short_parent(), Path(tempfile.gettempdir())}:
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                is_ours = _NAME.fullmatch(entry.name) and entry.is_dir(
                    follow_symlinks=False
                )
                if is_ours and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    yield Path(entry.path)


def _lock(path: Path) -> int | None:
    """Lock the folder. Returns the descriptor that holds the lock; None if another
    process holds it or the folder is gone. Programs that clean /tmp leave a locked
    folder alone, too."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except OSError:
        is_there = False
    if is_there:
        return descriptor
    os.close(descriptor)
    return None
