"""Fates of the rollouts of a run: its ledger, followed into the index as
`observe/samples/samples.py` reads it.

The ledger is followed by incarnation and sequence. An incarnation that is new may make
entries lost that were read before, so the ledger is read again then."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from invrl.buffer.ledger.ledger_store import first_lost_sequences, incarnations_in
from invrl.types.reasons import DropReason
from invrl.viewer.index_file import meta_number, set_meta

_LEDGER_BATCH = 20_000
_NEW_ENTRIES = """
    SELECT incarnation, sequence, group_id, "index", attempt, state, reason, batch_id, session_id
    FROM ledger WHERE (incarnation, sequence) > (?, ?) ORDER BY incarnation, sequence LIMIT ?
"""
_SET_LEDGER_STATE = """
    UPDATE rollouts SET state=:state, reason=:reason, step=:step, trained=(:state = 'trained'),
      staleness=CASE WHEN :step IS NULL THEN NULL ELSE MAX(0, :step - 1 - oldest_version) END
    WHERE session_id=:session_id AND purpose='train'
"""


class IndexedLedger:
    """Reads from `store` and writes to `index`, within the caller's transactions."""

    def __init__(self, store: sqlite3.Connection, index: sqlite3.Connection) -> None:
        self._store = store
        self._index = index

    def read(self) -> bool:
        """Read the next entries of the ledger. Returns whether there were any."""
        incarnations = incarnations_in(self._store)
        if len(incarnations) != meta_number(self._index, "incarnations"):
            self._index.execute("DELETE FROM fates")
            self._index.execute("DELETE FROM places")
            set_meta(self._index, "incarnations", len(incarnations))
            set_meta(self._index, "entry_incarnation", 0)
            set_meta(self._index, "entry_sequence", -1)
        last_entry = (
            meta_number(self._index, "entry_incarnation"),
            meta_number(self._index, "entry_sequence"),
        )
        rows = self._store.execute(
            _NEW_ENTRIES, (*last_entry, _LEDGER_BATCH)
        ).fetchall()
        if not rows:
            return False
        self._follow(rows, first_lost_sequences(incarnations))
        set_meta(self._index, "entry_incarnation", rows[-1][0])
        set_meta(self._index, "entry_sequence", rows[-1][1])
        return True

    def _follow(
        self, rows: Iterable[tuple[Any, ...]], lost_from: Mapping[int, float]
    ) -> None:
        """The fates of the rollouts that these entries name, as
        `observe/samples/samples.py` reads them."""
        places: dict[tuple[str, int, int], str] = {}
        fates: dict[str, tuple[str, str | None, int | None]] = {}
        for (
            incarnation,
            sequence,
            group_id,
            index,
            attempt,
            state,
            reason,
            batch_id,
            named_id,
        ) in rows:
            if sequence >= lost_from.get(incarnation, 0):
                if named_id and named_id not in fates and self.of(named_id) is None:
                    fates[named_id] = ("lost", None, None)
                continue
            place = (group_id, index, attempt)
            if named_id:
                places[place] = named_id
            session_id = places.get(place) or self._session_at(place)
            if not session_id:
                continue
            step = None
            if batch_id is not None:
                step = batch_id + 1  # batches are numbered from 0, steps from 1
            elif reason == DropReason.NOT_TRAINED:
                before = fates.get(session_id) or self.of(session_id)
                step = before[2] if before else None
            fates[session_id] = (state, reason, step)
        self._index.executemany(
            "INSERT OR REPLACE INTO places VALUES (?,?,?,?)",
            [(*place, session_id) for place, session_id in places.items()],
        )
        values = [
            {
                "session_id": session_id,
                "state": fate[0],
                "reason": fate[1],
                "step": fate[2],
            }
            for session_id, fate in fates.items()
        ]
        self._index.executemany(
            "INSERT OR REPLACE INTO fates VALUES (:session_id, :state, :reason, :step)",
            values,
        )
        self._index.executemany(_SET_LEDGER_STATE, values)

    def of(self, session_id: str) -> tuple[str, str | None, int | None] | None:
        """Return state, reason of a drop, and step; None if no entry names the
        session."""
        sql = "SELECT state, reason, step FROM fates WHERE session_id=?"
        return self._index.execute(sql, (session_id,)).fetchone()

    def _session_at(self, place: tuple[str, int, int]) -> str:
        sql = (
            'SELECT session_id FROM places WHERE group_id=? AND "index"=? AND attempt=?'
        )
        row = self._index.execute(sql, place).fetchone()
        if row is None:
            return ""
        return row[0]
