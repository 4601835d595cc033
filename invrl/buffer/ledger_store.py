"""The ledger kept: every entry of every life of a run, in the run's store.

An incarnation is one start of the run; it descends from the checkpoint that it resumed from. The surviving
lineage is what the last incarnation did, what its parent did up to that checkpoint, and so on back: what an
incarnation did after the checkpoint that its child began with is lost."""

import contextlib
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from invrl.buffer.ledger import LedgerEntry
from invrl.buffer.open_group import RolloutState
from invrl.errors import BufferStateError
from invrl.store.schema import connect
from invrl.types import Place


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One start of a run: the columns of its row."""

    number: int
    parent: int
    """The incarnation that this one goes on from; 0 if it goes on from none."""
    step: int
    """The step of the checkpoint that it began with; 0 if it began from the start."""
    sequence: int
    """The number of its first ledger entry. The parent's entries from that number on are lost."""
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntry:
    """A ledger entry with the incarnation that made it; `at` in Unix seconds."""

    incarnation: int
    at: float
    lost: bool
    entry: LedgerEntry


class LedgerStore:
    """The writer's side. Every call is one transaction."""

    def __init__(self, path: Path, *, heartbeat_timeout_s: float = 30.0) -> None:
        """`heartbeat_timeout_s`: see `busy_timeout_s`."""
        self._db = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._incarnation = 0

    def begin(self, *, parent: int, step: int, sequence: int) -> int:
        """Begins a new incarnation and returns its number. Raises BufferStateError if the store lacks the
        parent."""
        newest = self._db.execute("SELECT COALESCE(MAX(incarnation), 0) FROM incarnations").fetchone()[0]
        if parent > newest:
            raise BufferStateError(
                f"incarnation {parent} is to be gone on from, and the store ends with {newest}"
            )
        sql = "INSERT INTO incarnations (parent, step, sequence, started_at) VALUES (?,?,?,?)"
        self._incarnation = int(self._db.execute(sql, (parent, step, sequence, time.time())).lastrowid or 0)
        return self._incarnation

    def last_outbox_row(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM outbox").fetchone()[0])

    def write(self, entries: Iterable[LedgerEntry], *, to_disk: bool = False) -> None:
        """With `to_disk` everything that anybody has committed to the run's store so far, turns and outcomes
        included, survives a power loss once this returns: they are all in one log, which is flushed."""
        now = time.time()
        rows = []
        for sequence, place, *facts in map(astuple, entries):  # the table's columns have the fields' order
            rows.append((self._incarnation, sequence, *place, *facts, now))
        self._db.execute(f"PRAGMA synchronous={'FULL' if to_disk else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(f"INSERT INTO ledger VALUES ({','.join('?' * 13)})", rows)
            if to_disk:  # a commit flushes only if it changes something: the time does
                self._db.execute("INSERT OR REPLACE INTO flushes VALUES (?,?)", (self._incarnation, now))
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()


def read_incarnations(path: Path) -> list[Incarnation]:
    """All incarnations of the run, the oldest first."""
    rows = connect(path).execute(
        "SELECT incarnation, parent, step, sequence, started_at FROM incarnations ORDER BY incarnation"
    )
    return [Incarnation(*row) for row in rows]


def read_ledger(path: Path) -> list[KeptEntry]:
    """All entries, in the order they were made; `lost` says which are not of the surviving lineage. Raises
    BufferStateError for an incarnation that goes on from itself or a later one."""
    kept_below: dict[int, float] = {}
    incarnations = {incarnation.number: incarnation for incarnation in read_incarnations(path)}
    incarnation, bound = (max(incarnations), float("inf")) if incarnations else (0, 0.0)
    while incarnation in incarnations:
        kept_below[incarnation] = bound
        parent = incarnations[incarnation].parent
        if parent >= incarnation:
            raise BufferStateError(
                f"incarnation {incarnation} goes on from incarnation {parent}, which is not before it"
            )
        bound = min(bound, incarnations[incarnation].sequence)
        incarnation = parent
    rows = connect(path).execute("SELECT * FROM ledger ORDER BY incarnation, sequence")
    return [
        KeptEntry(incarnation=row[0], at=row[12], lost=row[1] >= kept_below.get(row[0], 0), entry=_entry(row))
        for row in rows
    ]


def check_lineage(kept: Iterable[KeptEntry], *, ended: bool) -> None:
    """Exactly once, along the surviving lineage: a place is in at most one training batch and ends at most
    once, batches follow each other without a gap, and in a run that has `ended` every place has. Raises
    BufferStateError that names the first place for which it does not hold."""
    last: dict[Place, RolloutState] = {}
    trained: dict[Place, int] = {}
    for entry in (one.entry for one in kept if not one.lost):
        if last.get(entry.place) in _ENDS:
            raise BufferStateError(f"{entry.place} ended as {last[entry.place]} and then is {entry.state}")
        last[entry.place] = entry.state
        if entry.state is RolloutState.TRAINED and entry.batch_id is not None:
            trained[entry.place] = entry.batch_id
    batches = sorted(set(trained.values()))
    if batches != list(range(len(batches))):
        raise BufferStateError(f"the batches of the lineage are {batches}: one is missing")
    open_places = [place for place, state in last.items() if state not in _ENDS]
    if ended and open_places:
        raise BufferStateError(f"{len(open_places)} rollouts have not ended, {open_places[0]} first")


_ENDS = (RolloutState.TRAINED, RolloutState.DROPPED)
_FIELDS = tuple(field.name for field in fields(LedgerEntry))


def _entry(row: tuple[Any, ...]) -> LedgerEntry:
    _, sequence, group_id, index, attempt, *facts, _ = row
    values = (sequence, Place(group_id, index, attempt), *facts)
    return msgspec.convert(dict(zip(_FIELDS, values, strict=True)), LedgerEntry)
