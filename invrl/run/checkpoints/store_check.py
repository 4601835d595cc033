"""Checks that a run's store is undamaged and fits a checkpoint: before an incarnation
starts, and before the ledger is read.

A store that is missing, damaged, or of another checkpoint is reported here with a fix,
and not hours later as an SQLite error. `quick_check` reads the whole file once; it
finds damaged pages, but not a changed byte inside a value.
"""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.errors import DamagedFileError
from invrl.store.schema import check_version

_FINDINGS = 3
_RESTORE = "copy back a run.sqlite that was saved with these checkpoints"
_ANEW = "begin a new run: --run-name NEW --model-path"


def check_store(path: Path) -> None:
    """Check that the store can be read; a missing one is not created. Raises
    DamagedFileError."""
    if not path.exists():
        raise DamagedFileError(
            path, "it is missing", "give the folder of a run that has begun"
        )
    with _opened(
        path,
        "copy back a run.sqlite that was saved, or begin a new run (--run-name NEW)",
    ):
        pass


def check_checkpoint_store(path: Path, checkpoint: Path, snapshot: bytes) -> None:
    """Check that the store is undamaged and holds what the snapshot of this checkpoint
    names. Raises DamagedFileError."""
    fix = f"{_RESTORE}, or {_ANEW} {checkpoint}"
    if not path.exists():
        raise DamagedFileError(
            path, f"it is missing, and {checkpoint.name} resumes from what it held", fix
        )
    try:
        buffer = msgspec.json.decode(snapshot, type=BufferSnapshot)
    except msgspec.MsgspecError as error:
        raise DamagedFileError(
            checkpoint / "buffer.json", f"it cannot be read: {error}"
        ) from error
    with _opened(path, fix) as db:
        tables = {
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type='table'"
            )
        }
        if not {"incarnations", "outbox"} <= tables:
            raise DamagedFileError(
                path,
                f"it is empty, and {checkpoint.name} resumes from what it held",
                fix,
            )
        newest_incarnation, newest_row = db.execute(
            "SELECT (SELECT COALESCE(MAX(incarnation), 0) FROM incarnations),"
            " (SELECT COALESCE(MAX(seq), 0) FROM outbox)"
        ).fetchone()
    if newest_incarnation < buffer.incarnation or newest_row < buffer.outbox_seq:
        reason = (
            f"it ends with incarnation {newest_incarnation} and outcome {newest_row}, and {checkpoint.name} "
            f"was made in incarnation {buffer.incarnation} after outcome {buffer.outbox_seq}: "
            "it is older, or another run's"
        )
        raise DamagedFileError(path, reason, fix)


@contextlib.contextmanager
def _opened(path: Path, fix: str) -> Iterator[sqlite3.Connection]:
    """Connect to a store that SQLite finds undamaged; errors within the block count as
    damage too."""
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)
        ) as db:
            found = [
                " ".join(str(row[0]).split())
                for row in db.execute(f"PRAGMA quick_check({_FINDINGS})")
            ]
            if found != ["ok"]:
                raise DamagedFileError(
                    path, f"SQLite finds it damaged: {'; '.join(found)}", fix
                )
            check_version(db, path)
            yield db
    except (
        sqlite3.DatabaseError,
        UnicodeDecodeError,
    ) as error:  # an error may quote a damaged name
        raise DamagedFileError(path, f"SQLite cannot read it: {error}", fix) from error
