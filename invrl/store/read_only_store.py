"""Connections to a run's store that leave the run's folder unchanged, byte by byte and
file by file.

SQLite's "read only" mode still creates its log files next to a store, and writes
readers' marks into the shared one. So the way of opening depends on the files: a store
without a log is opened as immutable; one with a log and its shared index without the
right to write to that index; one with a log and no index (a copied folder) from a copy
in the cache. Connections are short: a store whose writer ends during a read keeps its
log.
"""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from invrl.errors import DamagedFileError, RunStoreError
from invrl.host.files.private_file import open_private
from invrl.store.schema import check_version

_NO_STORE = (
    "a run on a file has no rollouts; another one makes its store when it begins"
)
_WAIT_S = 1.0
"""Maximum wait for a process that holds the store exclusively."""


class ReadOnlyStore:
    """The store at `path`. `copies` is the folder for a copy of it, private to its
    user."""

    def __init__(self, path: Path, copies: Path) -> None:
        self.path = path
        self._copies = copies

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Open a connection for one query. Raises DamagedFileError if the store is
        missing, damaged or of another version, and RunStoreError if another process
        holds it exclusively; also for errors of SQLite while the caller reads."""
        if not self.path.exists():
            raise DamagedFileError(self.path, "it is missing", _NO_STORE)
        try:
            with contextlib.closing(self._connect()) as db:
                if not check_version(db, self.path):
                    raise DamagedFileError(
                        self.path, "it is empty", "wait until the run has begun"
                    )
                yield db
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise RunStoreError(
                    f"{self.path}: another process holds it alone ({error}); end that process, or wait for it"
                ) from error
            raise self._damaged(error) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error

    def state(self) -> tuple[int, ...]:
        """Return numbers that change with every write to the store."""
        return file_state(self.path, self._beside("-wal"))

    def _connect(self) -> sqlite3.Connection:
        log = self._beside("-wal")
        has_log = log.exists() and log.stat().st_size > 0
        if self._beside("-shm").exists() and log.exists():
            return _open(self.path, "mode=ro&readonly_shm=1")
        if not has_log:
            return _open(self.path, "mode=ro&immutable=1")
        return _open(self._copy(log), "mode=rw")

    def _copy(self, log: Path) -> Path:
        """Copy the store and its log, again whenever either has changed."""
        name = "-".join(str(number) for number in self.state())
        copy = self._copies / f"copy-{name}.sqlite"
        if not copy.exists():
            for old in self._copies.glob("copy-*"):
                old.unlink(missing_ok=True)
            self._copies.mkdir(parents=True, exist_ok=True, mode=0o700)
            _copy_private(log, copy.with_name(copy.name + "-wal"))
            partial = copy.with_name(copy.name + ".part")
            _copy_private(self.path, partial)
            os.replace(partial, copy)  # the copy exists only when it is whole
        return copy

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _damaged(self, error: sqlite3.Error) -> DamagedFileError:
        fix = "copy back a run.sqlite that was saved; metrics and settings are shown without it"
        return DamagedFileError(self.path, f"SQLite cannot read it: {error}", fix)


def file_state(*paths: Path) -> tuple[int, ...]:
    """Return numbers that change with the files: inode, size and time of each."""
    numbers: list[int] = []
    for path in paths:
        try:
            facts = path.stat()
        except OSError:
            numbers += [0, 0, 0]
            continue
        numbers += [facts.st_ino, facts.st_size, facts.st_mtime_ns]
    return tuple(numbers)


def _open(path: Path, options: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{options}"
    db = sqlite3.connect(
        uri, uri=True, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
    )
    db.execute("PRAGMA temp_store=MEMORY")
    db.execute("PRAGMA query_only=1")
    return db


def _copy_private(source: Path, target: Path) -> None:
    with source.open("rb") as content, open_private(target) as file:
        shutil.copyfileobj(content, file, 1 << 20)
