"""Fills the index of a run from its store, in batches, whenever the store has grown.

Sessions are followed by their rows, turns by `seq`. `indexed_ledger.py` adds the fates
of rollouts, `indexed_training.py` the training of their tokens.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from invrl.gateway.types import Message
from invrl.observe.samples.samples import failure_reward, parse_evaluation
from invrl.observe.samples.transcript import message_text
from invrl.store.rows import outcome_from_json
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome
from invrl.viewer.index_file import (
    TURN_BITS,
    IndexState,
    meta_number,
    read_meta,
    session_rollout,
    set_meta,
)
from invrl.viewer.indexed_ledger import IndexedLedger
from invrl.viewer.indexed_training import IndexedTraining

if TYPE_CHECKING:
    from invrl.buffer.config import FailureRule

_FIRST_BATCH = 200
"""Sessions in the first batch of a new index, so that the page quickly has content."""
_SESSION_BATCH = 2_000
_TURN_BATCH = 1_000
_TURN_BATCH_BYTES = 4_000_000
_DETAIL_LENGTH = 300
"""Characters of a failure's first line that a row keeps."""

_SESSION_COLUMNS = (
    "id",
    "session_id",
    "task_id",
    "group_id",
    "index",
    "attempt",
    "purpose",
    "opened_at",
)
"""Columns of a rollout that are a session's own, in the order of `_SESSION`."""
_SESSION = 'rowid, id, task_id, group_id, "index", attempt, purpose, opened_at, state, parent_id, outcome'
_NEW_SESSIONS = f"SELECT {_SESSION} FROM sessions WHERE rowid>? ORDER BY rowid LIMIT ?"
_SESSIONS = (
    f"SELECT {_SESSION} FROM sessions WHERE rowid IN (SELECT value FROM json_each(?))"
)
_NEW_TURNS = "SELECT seq, session_id, logprobs, messages FROM turns WHERE seq>? ORDER BY seq LIMIT ?"


def read_identity(store: sqlite3.Connection, version: int) -> str:
    """Return the identity of the run in the store, which differs from that of another
    run at the same path."""
    first_session = store.execute(
        "SELECT id, opened_at FROM sessions ORDER BY rowid LIMIT 1"
    ).fetchone()
    first_start = store.execute(
        "SELECT started_at FROM incarnations ORDER BY incarnation LIMIT 1"
    ).fetchone()
    return json.dumps([version, first_session, first_start])


def read_state(store: sqlite3.Connection, index: sqlite3.Connection) -> IndexState:
    """Return how much of the store the index holds."""
    [rollouts] = store.execute(
        "SELECT COALESCE(MAX(rowid), 0) FROM sessions"
    ).fetchone()
    [turns] = store.execute("SELECT COALESCE(MAX(seq), 0) FROM turns").fetchone()
    rollouts_indexed = meta_number(index, "session_row")
    turns_indexed = meta_number(index, "turn_seq")
    return IndexState(
        rollouts_indexed=rollouts_indexed,
        rollouts=rollouts,
        turns_indexed=turns_indexed,
        turns=turns,
        ready=rollouts_indexed >= rollouts and turns_indexed >= turns,
    )


class IndexFiller:
    """Copies from `store` (read-only) to `index`; both are the caller's connections.
    `rules`: the run's, for failures that count with a reward. `is_live`: whether a
    process works in the run's folder. `trained_tokens`: folder of
    `store/trained_tokens.py`."""

    def __init__(
        self,
        store: sqlite3.Connection,
        index: sqlite3.Connection,
        *,
        rules: Mapping[FailureReason, FailureRule],
        is_live: bool,
        trained_tokens: Path,
    ) -> None:
        self._store = store
        self._ledger_states = IndexedLedger(store, index)
        self._trained = IndexedTraining(store, index, trained_tokens)
        self._index = index
        self._rules = rules
        self._is_live = is_live

    def continues(self) -> bool:
        """Whether the store still holds what was read last. False after an older copy
        was restored."""
        last_row = meta_number(self._index, "session_row")
        last_seq = meta_number(self._index, "turn_seq")
        checks = (
            ("SELECT id FROM sessions WHERE rowid=?", last_row, "session_id"),
            ("SELECT id FROM turns WHERE seq=?", last_seq, "turn_id"),
        )
        for sql, number, key in checks:
            if not number:
                continue
            row = self._store.execute(sql, (number,)).fetchone()
            if row is None or row[0] != read_meta(self._index, key):
                return False
        return True

    def fill(self) -> bool:
        """Add one batch of new data, in one transaction. Returns whether there was
        any."""
        # a single snapshot: no turn without its session
        self._store.execute("BEGIN")
        self._index.execute("BEGIN IMMEDIATE")
        try:
            # Visible data comes first: all rollouts and their fates, then their texts.
            has_more = self._add_sessions()
            has_more = self._ledger_states.read() or has_more
            if not has_more:
                has_more = self._update_open() or has_more
                has_more = self._add_turns() or has_more
            if not has_more:
                has_more = self._trained.read()
            self._index.execute("COMMIT")
        except BaseException:
            self._index.execute("ROLLBACK")
            raise
        finally:
            self._store.execute("COMMIT")
        return has_more

    # ----------------------------------------------------------------- sessions

    def _add_sessions(self) -> bool:
        last_row = meta_number(self._index, "session_row")
        limit = _SESSION_BATCH if last_row else _FIRST_BATCH
        rows = self._store.execute(_NEW_SESSIONS, (last_row, limit)).fetchall()
        if not rows:
            return False
        self._put(rows)
        set_meta(self._index, "session_row", rows[-1][0])
        set_meta(self._index, "session_id", rows[-1][1])
        return True

    def _update_open(self) -> bool:
        """Update sessions that had not ended when they were last read."""
        rowids = [
            row[0]
            for row in self._index.execute("SELECT id FROM rollouts WHERE ended=0")
        ]
        if not rowids:
            return False
        rows = self._store.execute(_SESSIONS, (json.dumps(rowids),)).fetchall()
        ended = [row for row in rows if row[-1] is not None]
        self._put(ended)
        if not self._is_live:
            sql = "UPDATE rollouts SET state='abandoned' WHERE ended=0 AND state='running'"
        else:
            sql = "UPDATE rollouts SET state='running' WHERE ended=0 AND state='abandoned'"
        changed = self._index.execute(sql).rowcount
        lost = [(row[1],) for row in rows if row[-1] is None and row[8] == "lost"]
        sql = "UPDATE rollouts SET state='abandoned' WHERE session_id=? AND state='running'"
        self._index.executemany(sql, lost)
        return bool(ended) or changed > 0

    def _put(self, rows: Iterable[tuple[Any, ...]]) -> None:
        groups: set[str] = set()
        tasks: set[str] = set()
        for row in rows:
            parent_id = row[9]
            if parent_id:
                self._add_child(row[1], parent_id)
                continue
            values = self._row_values(row)
            self._add_rollout(values)
            groups.add(values["group_id"])
            tasks.add(values["task"])
        self._rate("group_id=? AND purpose!='eval'", groups)
        # a held-out rollout: with its task in all evaluations
        self._rate("task=? AND purpose='eval'", tasks)

    def _add_child(self, session_id: str, parent_id: str) -> None:
        rollout = session_rollout(self._index, parent_id)
        if rollout is not None:
            self._index.execute(
                "INSERT OR REPLACE INTO children VALUES (?,?)", (session_id, rollout)
            )

    def _add_rollout(self, values: dict[str, Any]) -> None:
        """Add the rollout, or change these columns of it."""
        if values["purpose"] == "eval":
            # Only the last attempt of a repeated evaluation counts.
            sql = "UPDATE rollouts SET state='repeated' WHERE group_id=? AND \"index\"=? AND id<?"
            self._index.execute(
                sql, (values["group_id"], values["index"], values["id"])
            )
        fork_reasons = values.get("fork_reasons", {})
        components = values.get("components", {})
        self._index.executemany(
            "INSERT OR REPLACE INTO forks VALUES (?,?,?)",
            [(reason, values["id"], count) for reason, count in fork_reasons.items()],
        )
        self._index.executemany(
            "INSERT OR REPLACE INTO component_values VALUES (?,?,?)",
            [(name, values["id"], value) for name, value in components.items()],
        )
        values["fork_reasons"] = json.dumps(fork_reasons)
        values["components"] = json.dumps(components)
        columns = [f'"{name}"' for name in values]
        marks = ",".join("?" * len(values))
        changes = ",".join(f"{column}=excluded.{column}" for column in columns)
        self._index.execute(
            f"INSERT INTO rollouts ({','.join(columns)}) VALUES ({marks}) "
            f"ON CONFLICT (id) DO UPDATE SET {changes}",
            list(values.values()),
        )

    def _row_values(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """Return the columns of a rollout that are known, by name."""
        *of_session, state, _, body = row
        values: dict[str, Any] = dict(zip(_SESSION_COLUMNS, of_session, strict=True))
        values["task"] = self._first_task_id(values["task_id"])
        values["ended"] = int(body is not None)
        if body is None:
            values["state"] = "abandoned" if state == "lost" else "running"
        else:
            try:
                self._add_outcome(values, outcome_from_json(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                values["state"] = "failed"
                values["detail"] = f"its outcome in the store is damaged: {error}"[
                    :_DETAIL_LENGTH
                ]
        self._add_ledger_state(values)
        return values

    def _add_outcome(self, values: dict[str, Any], outcome: Outcome) -> None:
        values["state"] = "finished"
        if isinstance(outcome, FailedRollout):
            values["state"] = "failed"
            values["failure"] = str(outcome.reason)
            values["detail"] = outcome.detail.strip().partition("\n")[0][
                :_DETAIL_LENGTH
            ]
            values["reward"] = failure_reward(outcome, values["purpose"], self._rules)
            summary = outcome.partial
        else:
            values["reward"] = outcome.reward
            values["components"] = dict(outcome.reward_components)
            summary = outcome
        if summary is None:
            return
        prefix = "forks/"
        values |= {
            "turns": summary.num_turns,
            "sampled_tokens": summary.sampled_tokens,
            "truncated": int(summary.truncated),
            "forks": summary.forks,
            "fork_reasons": {
                name.removeprefix(prefix): count
                for name, count in summary.counts.items()
                if name.startswith(prefix)
            },
            "oldest_version": int(summary.oldest_version),
            "newest_version": int(summary.newest_version),
            "seconds": max(0.0, summary.finished_at - summary.started_at),
        }

    def _add_ledger_state(self, values: dict[str, Any]) -> None:
        """Add state, reason and step, which are not the session's own."""
        values["trained"] = 0
        if values["purpose"] == "eval":
            values["step"], values["evaluation"] = parse_evaluation(
                values["group_id"], values["task_id"]
            )
            if values["ended"]:
                values["state"] = "evaluated"
            return
        if values["purpose"] == "serve":
            if values["ended"]:
                values["state"] = "served"
            return
        fate = self._ledger_states.of(values["session_id"])
        if fate is None:
            return
        values["state"], values["reason"], values["step"] = fate
        values["trained"] = int(values["state"] == "trained")
        oldest_version = values.get("oldest_version")
        if values["step"] is not None and oldest_version is not None:
            values["staleness"] = max(0, values["step"] - 1 - oldest_version)

    def _first_task_id(self, task_id: str) -> str:
        """Return the task's first id, without the number of a later epoch."""
        base, _, number = task_id.rpartition("@")
        if not base or not number.isdecimal():
            return task_id
        known = self._index.execute(
            "SELECT 1 FROM rollouts WHERE task=? LIMIT 1", (base,)
        ).fetchone()
        if known is None:
            return task_id
        return base

    # ------------------------------------------------------ how surprising a reward is

    def _rate(self, compared: str, values: Iterable[str]) -> None:
        """Rate each reward by its distance from the mean of those that the condition
        `compared` selects with one of the values."""
        sql = f"SELECT id, reward FROM rollouts WHERE {compared} AND reward IS NOT NULL"
        for value in values:
            rated = self._index.execute(sql, (value,)).fetchall()
            if len(rated) < 2:
                continue
            rewards = [reward for _, reward in rated]
            mean = fmean(rewards)
            deviation = pstdev(rewards) or math.inf
            self._index.executemany(
                "UPDATE rollouts SET surprise=? WHERE id=?",
                [
                    (abs(reward - mean) / deviation, rollout)
                    for rollout, reward in rated
                ],
            )

    # ----------------------------------------------------------------- what was said

    def _add_turns(self) -> bool:
        last_seq = meta_number(self._index, "turn_seq")
        read_bytes = 0
        newest_seq = 0
        for seq, session_id, logprobs, messages in self._store.execute(
            _NEW_TURNS, (last_seq, _TURN_BATCH)
        ):
            newest_seq = seq
            self._add_turn(session_id, logprobs, messages)
            read_bytes += len(messages) + len(logprobs)
            if read_bytes > _TURN_BATCH_BYTES:
                break
        if not newest_seq:
            return False
        [turn_id] = self._store.execute(
            "SELECT id FROM turns WHERE seq=?", (newest_seq,)
        ).fetchone()
        set_meta(self._index, "turn_seq", newest_seq)
        set_meta(self._index, "turn_id", turn_id)
        return True

    def _add_turn(self, session_id: str, logprobs: bytes, messages: bytes) -> None:
        rollout = session_rollout(self._index, session_id)
        if rollout is None:
            return  # a turn without its session, which no run leaves
        logprobs_T = np.frombuffer(logprobs, np.float32)
        sql = (
            "UPDATE rollouts SET turns_read=turns_read+1, logprob_sum=logprob_sum+?, "
            "logprob_count=logprob_count+?, "
            "logprob=(logprob_sum+?)/NULLIF(logprob_count+?, 0) WHERE id=? RETURNING turns_read"
        )
        total = float(np.nan_to_num(logprobs_T.astype(np.float64)).sum())
        values = (total, len(logprobs_T), total, len(logprobs_T), rollout)
        [number] = self._index.execute(sql, values).fetchone()
        text = _search_texts(messages)
        document = (rollout << TURN_BITS) + number
        self._index.execute(
            "INSERT INTO said (rowid, text) VALUES (?,?)", (document, text)
        )


def _search_texts(messages: bytes) -> str:
    """Return the texts of a turn's messages; "" if they cannot be read."""
    try:
        decoded = msgspec.json.decode(messages, type=list[Message])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return "\n".join(message_text(message) for message in decoded)
