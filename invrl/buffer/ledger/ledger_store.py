"""The ledger in the run's store: every entry of every incarnation of the run.

An incarnation is one start of the run. It descends from the incarnation whose
checkpoint it resumed from. The surviving lineage is everything that the last
incarnation did, everything that its parent did up to that checkpoint, and so on back to
the first. Everything after a child's checkpoint is lost.
"""

import contextlib
import math
import sqlite3
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.open_group import RolloutState
from invrl.errors import BufferStateError, RunStoreError
from invrl.store.schema import connect
from invrl.types.leases import Place


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a run: the columns of its row."""

    number: int
    parent: int
    """Incarnation whose checkpoint this one resumed from; 0 for none."""
    step: int
    """Step of the checkpoint that it began with; 0 if it began from the start."""
    sequence: int
    """Number of its first ledger entry. Its parent's entries from that number on are
    lost."""
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """A stored ledger entry, and the incarnation that wrote it."""

    incarnation: int
    at: float
    """Time of the write in Unix seconds."""
    lost: bool
    """Whether it is outside of the surviving lineage."""
    entry: LedgerEntry


class LedgerStore:
    """Writes the ledger. Every call is one transaction."""

    def __init__(self, path: Path, *, heartbeat_timeout_s: float = 30.0) -> None:
        """`heartbeat_timeout_s` limits the wait for other writers, see `busy_timeout_s`
        in `schema.py`."""
        self._db = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._incarnation = 0

    def begin(self, *, parent: int, step: int, sequence: int) -> int:
        """Begin a new incarnation and return its number. Raises RunStoreError if the
        parent is not in the store."""
        newest = self._db.execute(
            "SELECT COALESCE(MAX(incarnation), 0) FROM incarnations"
        ).fetchone()[0]
        if parent > newest:
            raise RunStoreError(
                f"the checkpoint is of incarnation {parent}, but the run's store ends with {newest}"
            )
        sql = "INSERT INTO incarnations (parent, step, sequence, started_at) VALUES (?,?,?,?)"
        cursor = self._db.execute(sql, (parent, step, sequence, time.time()))
        self._incarnation = int(cursor.lastrowid or 0)
        return self._incarnation

    def last_outbox_row(self) -> int:
        """Return the number of the newest row of the outbox; 0 if there is none."""
        row = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM outbox").fetchone()
        return int(row[0])

    def write(self, entries: Iterable[LedgerEntry], *, to_disk: bool = False) -> None:
        """Write the entries in one transaction. With `to_disk`, everything that any
        process has committed to the run's store so far, turns and outcomes included,
        survives a power loss once this returns: all of it is in one log, and the log is
        flushed."""
        now = time.time()
        rows = [_row(entry, self._incarnation, now) for entry in entries]
        placeholders = ", ".join("?" for _ in _COLUMNS)
        sql = f"INSERT INTO ledger ({', '.join(_COLUMNS)}) VALUES ({placeholders})"
        synchronous = "NORMAL"
        if to_disk:
            synchronous = "FULL"
        self._db.execute(f"PRAGMA synchronous={synchronous}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(sql, rows)
            if (
                to_disk
            ):  # a commit flushes only if it changes something: the time changes
                self._db.execute(
                    "INSERT OR REPLACE INTO flushes VALUES (?,?)",
                    (self._incarnation, now),
                )
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(
                sqlite3.Error
            ):  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()


def read_incarnations(path: Path) -> list[Incarnation]:
    """Return all incarnations of the run, oldest first."""
    return incarnations_in(connect(path))


def incarnations_in(db: sqlite3.Connection) -> list[Incarnation]:
    """Return all incarnations through a connection of the caller."""
    rows = db.execute(
        "SELECT incarnation, parent, step, sequence, started_at FROM incarnations ORDER BY incarnation"
    )
    return [Incarnation(*row) for row in rows]


def read_ledger(path: Path) -> list[StoredEntry]:
    """Return all entries in the order of writing. Raises RunStoreError if the parent of
    an incarnation is the incarnation itself or a later one."""
    return ledger_in(connect(path))


def ledger_in(
    db: sqlite3.Connection, *, group_id: str | None = None
) -> list[StoredEntry]:
    """Return entries like `read_ledger`, through a connection of the caller. `group_id`
    selects the entries of one group."""
    lost_from = first_lost_sequences(incarnations_in(db))
    condition = ""
    values: tuple[str, ...] = ()
    if group_id is not None:
        condition = "WHERE group_id=?"
        values = (group_id,)
    sql = f"SELECT {', '.join(_COLUMNS)} FROM ledger {condition} ORDER BY incarnation, sequence"
    return [_stored_entry(row, lost_from) for row in db.execute(sql, values)]


def first_lost_sequences(incarnations: Iterable[Incarnation]) -> dict[int, float]:
    """Return, for each incarnation of the surviving lineage, the sequence number from
    which its entries are lost: infinity for the last incarnation, which loses none.
    Walks from the last incarnation to its parent, and so on to the first. All entries
    of incarnations off that path are lost."""
    by_number = {incarnation.number: incarnation for incarnation in incarnations}
    lost_from: dict[int, float] = {}
    number = max(by_number, default=0)
    bound = math.inf
    while number in by_number:
        incarnation = by_number[number]
        lost_from[number] = bound
        if incarnation.parent >= number:
            raise RunStoreError(
                f"incarnation {number} resumed from incarnation {incarnation.parent}, which is not before it"
            )
        bound = min(bound, incarnation.sequence)
        number = incarnation.parent
    return lost_from


def check_lineage(kept: Iterable[StoredEntry], *, ended: bool) -> None:
    """Check that training was exactly-once along the surviving lineage: a place ends at
    most once and is in at most one training batch, the batches are numbered without a
    gap, and in a run that has `ended` every place has ended. Raises BufferStateError
    naming the first violation."""
    last_states: dict[Place, RolloutState] = {}
    batch_ids: set[int] = set()
    for stored_entry in kept:
        if stored_entry.lost:
            continue
        entry = stored_entry.entry
        last_state = last_states.get(entry.place)
        if last_state in _ENDS:
            raise BufferStateError(
                f"{entry.place} ended as {last_state} and then became {entry.state}"
            )
        last_states[entry.place] = entry.state
        if entry.state is RolloutState.TRAINED and entry.batch_id is not None:
            batch_ids.add(entry.batch_id)
    batches = sorted(batch_ids)
    if batches != list(range(len(batches))):
        raise BufferStateError(
            f"the batches of the lineage are {batches}: one is missing"
        )
    open_places = [place for place, state in last_states.items() if state not in _ENDS]
    if ended and open_places:
        raise BufferStateError(
            f"{len(open_places)} rollouts have not ended; the first is {open_places[0]}"
        )


_ENDS = (RolloutState.TRAINED, RolloutState.DROPPED)
_COLUMNS = (
    "incarnation",
    "sequence",
    "group_id",
    '"index"',
    "attempt",
    "task_id",
    "state",
    "reason",
    "failure",
    "detail",
    "batch_id",
    "session_id",
    "at",
)


def _row(entry: LedgerEntry, incarnation: int, at: float) -> tuple[Any, ...]:
    """Return the values of `_COLUMNS`."""
    return (
        incarnation,
        entry.sequence,
        entry.place.group_id,
        entry.place.index,
        entry.place.attempt,
        entry.task_id,
        entry.state,
        entry.reason,
        entry.failure,
        entry.detail,
        entry.batch_id,
        entry.session_id,
        at,
    )


def _stored_entry(row: tuple[Any, ...], lost_from: Mapping[int, float]) -> StoredEntry:
    """Build an entry from the values of `_COLUMNS`. For `lost_from` see
    `first_lost_sequences`."""
    values = dict(zip(_COLUMNS, row, strict=True))
    incarnation = values.pop("incarnation")
    written_at = values.pop("at")
    place = Place(values.pop("group_id"), values.pop('"index"'), values.pop("attempt"))
    entry = msgspec.convert({"place": place, **values}, LedgerEntry)
    is_lost = entry.sequence >= lost_from.get(incarnation, 0)
    return StoredEntry(
        incarnation=incarnation, at=written_at, lost=is_lost, entry=entry
    )
