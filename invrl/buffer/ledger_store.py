"""The ledger kept: every entry of every life of a run, in the run's store.

A life is one start of the run; it descends from the checkpoint that it resumed from. The surviving lineage
is what the last life did, what its parent did up to that checkpoint, and so on back: what a life did after
the checkpoint that its child began with is lost."""

import contextlib
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from invrl.buffer.ledger import LedgerEntry
from invrl.buffer.open_group import Place, RolloutState
from invrl.errors import BufferStateError
from invrl.store.run_store import connect


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a run: the columns of its row."""

    number: int
    parent: int
    """The life that this one goes on from; 0 if it goes on from none."""
    step: int
    """The step of the checkpoint that it began with; 0 if it began from the start."""
    sequence: int
    """The number of its first ledger entry. The parent's entries from that number on are lost."""
    started_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEntry:
    """A ledger entry with the life that made it; `at` in Unix seconds."""

    life: int
    at: float
    lost: bool
    entry: LedgerEntry


class LedgerStore:
    """The writer's side. Every call is one transaction."""

    def __init__(self, path: Path, *, heartbeat_timeout_s: float = 30.0) -> None:
        """`heartbeat_timeout_s`: see `busy_timeout_s`."""
        self._db = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._life = 0

    def begin(self, *, parent: int, step: int, sequence: int) -> int:
        """Begins a new life and returns its number. Raises BufferStateError if the store lacks the parent."""
        newest = self._db.execute("SELECT COALESCE(MAX(life), 0) FROM lives").fetchone()[0]
        if parent > newest:
            raise BufferStateError(f"life {parent} is to be gone on from, and the store ends with {newest}")
        sql = "INSERT INTO lives (parent, step, sequence, started_at) VALUES (?,?,?,?)"
        self._life = int(self._db.execute(sql, (parent, step, sequence, time.time())).lastrowid or 0)
        return self._life

    def last_outbox_row(self) -> int:
        return int(self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM outbox").fetchone()[0])

    def write(self, entries: Iterable[LedgerEntry], *, to_disk: bool = False) -> None:
        """With `to_disk` everything that anybody has committed to the run's store so far, turns and outcomes
        included, survives a power loss once this returns: they are all in one log, which is flushed."""
        now = time.time()
        rows = []
        for sequence, place, *facts in map(astuple, entries):  # the table's columns have the fields' order
            rows.append((self._life, sequence, *place, *facts, now))
        self._db.execute(f"PRAGMA synchronous={'FULL' if to_disk else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany(f"INSERT INTO ledger VALUES ({','.join('?' * 13)})", rows)
            if to_disk:  # a commit flushes only if it changes something: the time does
                self._db.execute("INSERT OR REPLACE INTO flushes VALUES (?,?)", (self._life, now))
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()


def read_lives(path: Path) -> list[Life]:
    """All lives of the run, the oldest first."""
    rows = connect(path).execute("SELECT life, parent, step, sequence, started_at FROM lives ORDER BY life")
    return [Life(*row) for row in rows]


def read_ledger(path: Path) -> list[KeptEntry]:
    """All entries, in the order they were made; `lost` says which are not of the surviving lineage. Raises
    BufferStateError for a life that goes on from itself or a later one."""
    kept_below: dict[int, float] = {}
    lives = {life.number: life for life in read_lives(path)}
    life, bound = (max(lives), float("inf")) if lives else (0, 0.0)
    while life in lives:
        kept_below[life] = bound
        parent = lives[life].parent
        if parent >= life:
            raise BufferStateError(f"life {life} goes on from life {parent}, which is not before it")
        bound = min(bound, lives[life].sequence)
        life = parent
    rows = connect(path).execute("SELECT * FROM ledger ORDER BY life, sequence")
    return [
        KeptEntry(life=row[0], at=row[12], lost=row[1] >= kept_below.get(row[0], 0), entry=_entry(row))
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
