"""Fills the index of a run from its store, in batches, and again whenever the store has grown.

Sessions are followed by their rows, turns by `seq`, the ledger by incarnation and sequence. What became of a
rollout is decided as `observe/samples.py` decides it. An incarnation that is new may make entries lost that
were read before, so the ledger is read again then."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.buffer.ledger_store import first_lost_sequences, incarnations_in
from invrl.errors import RunStoreError
from invrl.gateway.types import Message
from invrl.observe.samples import failure_reward, parse_evaluation
from invrl.observe.transcript import message_text
from invrl.reasons import DropReason, FailureReason
from invrl.store.rows import outcome_from_json
from invrl.store.trained_tokens import TrainedTurn, read_trained_tokens, recorded_steps, tokens_path
from invrl.types import FailedRollout, Outcome, RolloutSummary
from invrl.viewer.index_file import TURN_BITS, meta_number, meta_text, set_meta

if TYPE_CHECKING:
    from invrl.buffer.config import FailureRule

_FIRST_BATCH = 200
"""Sessions of a new index, so that there is something to see at once."""
_SESSION_BATCH = 2_000
_LEDGER_BATCH = 20_000
_TURN_BATCH = 1_000
_TURN_BATCH_BYTES = 4_000_000
_DETAIL_LENGTH = 300
"""Characters of a failure's first line that a row keeps."""

_SESSION = 'rowid, id, task_id, group_id, "index", attempt, purpose, opened_at, state, parent_id, outcome'
_NEW_SESSIONS = f"SELECT {_SESSION} FROM sessions WHERE rowid>? ORDER BY rowid LIMIT ?"
_SESSIONS = f"SELECT {_SESSION} FROM sessions WHERE rowid IN (SELECT value FROM json_each(?))"
_NEW_TURNS = "SELECT seq, session_id, logprobs, messages FROM turns WHERE seq>? ORDER BY seq LIMIT ?"
_NEW_ENTRIES = """
    SELECT incarnation, sequence, group_id, "index", attempt, state, reason, batch_id, session_id
    FROM ledger WHERE (incarnation, sequence) > (?, ?) ORDER BY incarnation, sequence LIMIT ?
"""
_ADD_ROLLOUT = """
    INSERT OR REPLACE INTO rollouts (
      id, session_id, task_id, task, group_id, "index", attempt, purpose, evaluation, step, state, reason,
      failure, detail, reward, components, turns, sampled_tokens, truncated, forks, fork_reasons,
      oldest_version, newest_version, staleness, opened_at, seconds, ended, trained,
      turns_read, logprob_sum, logprob_count, logprob, advantage, gap)
    VALUES (:id, :session_id, :task_id, :task, :group_id, :index, :attempt, :purpose, :evaluation, :step,
      :state, :reason, :failure, :detail, :reward, :components, :turns, :sampled_tokens, :truncated, :forks,
      :fork_reasons, :oldest_version, :newest_version, :staleness, :opened_at, :seconds, :ended, :trained,
      :turns_read, :logprob_sum, :logprob_count, :logprob, :advantage, :gap)
"""
_KEPT_COLUMNS = "turns_read, logprob_sum, logprob_count, logprob, advantage, gap"
_SET_FATE = """
    UPDATE rollouts SET state=:state, reason=:reason, step=:step, trained=(:state = 'trained'),
      staleness=CASE WHEN :step IS NULL THEN NULL ELSE MAX(0, :step - 1 - oldest_version) END
    WHERE session_id=:session_id AND purpose='train'
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of the store the index holds."""

    rollouts_indexed: int
    rollouts: int
    turns_indexed: int
    turns: int

    @property
    def complete(self) -> bool:
        return self.rollouts_indexed >= self.rollouts and self.turns_indexed >= self.turns


def identity_of(store: sqlite3.Connection, version: int) -> str:
    """Of the run in the store: another run at the same path has another one."""
    first_session = store.execute("SELECT id, opened_at FROM sessions ORDER BY rowid LIMIT 1").fetchone()
    first_start = store.execute("SELECT started_at FROM incarnations ORDER BY incarnation LIMIT 1").fetchone()
    return json.dumps([version, first_session, first_start])


def progress_of(store: sqlite3.Connection, index: sqlite3.Connection) -> Progress:
    """How much of the store the index holds."""
    [rollouts] = store.execute("SELECT COALESCE(MAX(rowid), 0) FROM sessions").fetchone()
    [turns] = store.execute("SELECT COALESCE(MAX(seq), 0) FROM turns").fetchone()
    return Progress(
        rollouts_indexed=meta_number(index, "session_row"),
        rollouts=rollouts,
        turns_indexed=meta_number(index, "turn_seq"),
        turns=turns,
    )


class IndexFiller:
    """Copies from `store` (read only) to `index`; both are connections of the caller. `rules`: the run's, for
    failures that count with a reward. `is_live`: whether a process works in the run's folder.
    `trained_tokens`: the folder of `store/trained_tokens.py`."""

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
        self._trained_tokens = trained_tokens
        self._index = index
        self._rules = rules
        self._is_live = is_live

    def continues(self) -> bool:
        """Whether the store still holds what was read last. Not so after an older copy was put back."""
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
            if row is None or row[0] != meta_text(self._index, key):
                return False
        return True

    def progress(self) -> Progress:
        return progress_of(self._store, self._index)

    def fill(self) -> bool:
        """One batch of whatever is new, in one transaction. Returns whether anything was."""
        self._store.execute("BEGIN")  # one moment: a turn is not seen without its session
        self._index.execute("BEGIN IMMEDIATE")
        try:
            # What a person sees first comes first: all rollouts and what became of them, then their texts.
            has_more = self._add_sessions()
            has_more = self._read_ledger() or has_more
            if not has_more:
                has_more = self._update_open() or has_more
                has_more = self._add_turns() or has_more
            if not has_more:
                has_more = self._add_trained_tokens()
            self._index.execute("COMMIT")
        except BaseException:
            self._index.execute("ROLLBACK")
            raise
        finally:
            self._store.execute("COMMIT")
        return has_more

    # ------------------------------------------------------------------ sessions

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
        """Sessions that had not ended when they were read last."""
        rowids = [row[0] for row in self._index.execute("SELECT id FROM rollouts WHERE ended=0")]
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
        self._rate_groups(groups)
        self._rate_tasks(tasks)

    def _add_child(self, session_id: str, parent_id: str) -> None:
        rollout = self._rollout_of(parent_id)
        if rollout is not None:
            self._index.execute("INSERT OR REPLACE INTO children VALUES (?,?)", (session_id, rollout))

    def _rollout_of(self, session_id: str) -> int | None:
        """The row of the rollout that a session belongs to."""
        sql = (
            "SELECT id FROM rollouts WHERE session_id=? "
            "UNION ALL SELECT rollout FROM children WHERE session_id=?"
        )
        row = self._index.execute(sql, (session_id, session_id)).fetchone()
        if row is None:
            return None
        return row[0]

    def _add_rollout(self, values: dict[str, Any]) -> None:
        sql = f"SELECT {_KEPT_COLUMNS} FROM rollouts WHERE id=?"
        kept = self._index.execute(sql, (values["id"],)).fetchone()
        if kept is None:
            kept = (0, 0.0, 0, None, None, None)
        values.update(zip(_KEPT_COLUMNS.split(", "), kept, strict=True))
        if values["purpose"] == "eval":
            # An evaluation that was repeated counts with its last attempt.
            sql = "UPDATE rollouts SET state='repeated' WHERE group_id=? AND \"index\"=? AND id<?"
            self._index.execute(sql, (values["group_id"], values["index"], values["id"]))
        fork_reasons = values["fork_reasons"]
        components = values["components"]
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
        self._index.execute(_ADD_ROLLOUT, values)

    def _row_values(self, row: tuple[Any, ...]) -> dict[str, Any]:
        """The columns of a rollout, by name."""
        rowid, session_id, task_id, group_id, index, attempt, purpose, opened_at, state, _, body = row
        values: dict[str, Any] = {
            "id": rowid,
            "session_id": session_id,
            "task_id": task_id,
            "task": self._task_of(task_id),
            "group_id": group_id,
            "index": index,
            "attempt": attempt,
            "purpose": purpose,
            "opened_at": opened_at,
            "evaluation": "",
            "step": None,
            "reason": None,
            "failure": None,
            "detail": "",
            "reward": None,
            "components": {},
            "turns": None,
            "sampled_tokens": None,
            "truncated": 0,
            "forks": 0,
            "fork_reasons": {},
            "oldest_version": None,
            "newest_version": None,
            "staleness": None,
            "seconds": None,
            "ended": int(body is not None),
        }
        if body is None:
            values["state"] = "abandoned" if state == "lost" else "running"
        else:
            try:
                self._add_outcome(values, outcome_from_json(body))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                values["state"] = "failed"
                values["detail"] = f"its outcome in the store is damaged: {error}"[:_DETAIL_LENGTH]
        self._add_fate(values)
        return values

    def _add_outcome(self, values: dict[str, Any], outcome: Outcome) -> None:
        values["state"] = "finished"
        summary = outcome
        if isinstance(outcome, FailedRollout):
            values["state"] = "failed"
            values["failure"] = str(outcome.reason)
            values["detail"] = outcome.detail.strip().partition("\n")[0][:_DETAIL_LENGTH]
            values["reward"] = failure_reward(outcome, values["purpose"], self._rules)
            summary = outcome.partial
        elif isinstance(outcome, RolloutSummary):
            values["reward"] = outcome.reward
            values["components"] = dict(outcome.reward_components)
        if not isinstance(summary, RolloutSummary):
            return
        prefix = "forks/"
        values["turns"] = summary.num_turns
        values["sampled_tokens"] = summary.sampled_tokens
        values["truncated"] = int(summary.truncated)
        values["forks"] = summary.forks
        values["fork_reasons"] = {
            name.removeprefix(prefix): count
            for name, count in summary.counts.items()
            if name.startswith(prefix)
        }
        values["oldest_version"] = int(summary.oldest_version)
        values["newest_version"] = int(summary.newest_version)
        values["seconds"] = max(0.0, summary.finished_at - summary.started_at)

    def _add_fate(self, values: dict[str, Any]) -> None:
        """State, reason and step, which are not the session's own."""
        values["trained"] = 0
        if values["purpose"] == "eval":
            values["step"], values["evaluation"] = parse_evaluation(values["group_id"], values["task_id"])
            if values["ended"]:
                values["state"] = "evaluated"
            return
        if values["purpose"] == "serve":
            if values["ended"]:
                values["state"] = "served"
            return
        sql = "SELECT state, reason, step FROM fates WHERE session_id=?"
        fate = self._index.execute(sql, (values["session_id"],)).fetchone()
        if fate is None:
            return
        values["state"], values["reason"], values["step"] = fate
        values["trained"] = int(values["state"] == "trained")
        if values["step"] is not None and values["oldest_version"] is not None:
            values["staleness"] = max(0, values["step"] - 1 - values["oldest_version"])

    def _task_of(self, task_id: str) -> str:
        """The id that the task had when it came first, without the number of a later epoch."""
        base, _, number = task_id.rpartition("@")
        if not base or not number.isdecimal():
            return task_id
        known = self._index.execute("SELECT 1 FROM rollouts WHERE task=? LIMIT 1", (base,)).fetchone()
        if known is None:
            return task_id
        return base

    # ------------------------------------------------------------------ how surprising a reward is

    def _rate_groups(self, groups: Iterable[str]) -> None:
        """Of groups with several rewards: the distance from the mean of the group."""
        sql = "SELECT id, reward FROM rollouts WHERE group_id=? AND reward IS NOT NULL AND purpose!='eval'"
        for group_id in groups:
            rated = self._index.execute(sql, (group_id,)).fetchall()
            if len(rated) > 1:
                self._rate(rated)

    def _rate_tasks(self, tasks: Iterable[str]) -> None:
        """Of held-out rollouts: the distance from the mean of their task over all evaluations."""
        sql = "SELECT id, reward FROM rollouts WHERE task=? AND reward IS NOT NULL AND purpose='eval'"
        for task in tasks:
            rated = self._index.execute(sql, (task,)).fetchall()
            if len(rated) > 1:
                self._rate(rated)

    def _rate(self, rated: list[tuple[int, float]]) -> None:
        rewards = [reward for _, reward in rated]
        mean = fmean(rewards)
        deviation = pstdev(rewards)
        distances: list[tuple[float, int]] = []
        for rollout, reward in rated:
            distance = 0.0
            if deviation > 0:
                distance = abs(reward - mean) / deviation
            distances.append((distance, rollout))
        self._index.executemany("UPDATE rollouts SET surprise=? WHERE id=?", distances)

    # ------------------------------------------------------------------ the ledger

    def _read_ledger(self) -> bool:
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
        rows = self._store.execute(_NEW_ENTRIES, (*last_entry, _LEDGER_BATCH)).fetchall()
        if not rows:
            return False
        self._follow(rows, first_lost_sequences(incarnations))
        set_meta(self._index, "entry_incarnation", rows[-1][0])
        set_meta(self._index, "entry_sequence", rows[-1][1])
        return True

    def _follow(self, rows: Iterable[tuple[Any, ...]], lost_from: Mapping[int, float]) -> None:
        """The fates of the rollouts that these entries name, as `observe/samples.py` reads them."""
        places: dict[tuple[str, int, int], str] = {}
        fates: dict[str, tuple[str, str | None, int | None]] = {}
        for incarnation, sequence, group_id, index, attempt, state, reason, batch_id, named_id in rows:
            if sequence >= lost_from.get(incarnation, 0):
                if named_id and named_id not in fates and self._fate(named_id) is None:
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
                before = fates.get(session_id) or self._fate(session_id)
                step = before[2] if before else None
            fates[session_id] = (state, reason, step)
        self._index.executemany(
            "INSERT OR REPLACE INTO places VALUES (?,?,?,?)",
            [(*place, session_id) for place, session_id in places.items()],
        )
        values = [
            {"session_id": session_id, "state": fate[0], "reason": fate[1], "step": fate[2]}
            for session_id, fate in fates.items()
        ]
        self._index.executemany(
            "INSERT OR REPLACE INTO fates VALUES (:session_id, :state, :reason, :step)", values
        )
        self._index.executemany(_SET_FATE, values)

    def _fate(self, session_id: str) -> tuple[str, str | None, int | None] | None:
        sql = "SELECT state, reason, step FROM fates WHERE session_id=?"
        return self._index.execute(sql, (session_id,)).fetchone()

    def _session_at(self, place: tuple[str, int, int]) -> str:
        sql = 'SELECT session_id FROM places WHERE group_id=? AND "index"=? AND attempt=?'
        row = self._index.execute(sql, place).fetchone()
        if row is None:
            return ""
        return row[0]

    # ------------------------------------------------------------------ what training did

    def _add_trained_tokens(self) -> bool:
        """The advantages and the trainer's log-probs of one step that was written since."""
        try:
            written = self._trained_tokens.stat().st_mtime_ns
        except OSError:
            return False
        if written == meta_number(self._index, "tokens_written"):
            return False
        for step in recorded_steps(self._trained_tokens):
            key = f"tokens_of_step_{step}"
            changed = tokens_path(self._trained_tokens, step).stat().st_mtime_ns
            if changed == meta_number(self._index, key):
                continue
            set_meta(self._index, key, changed)
            self._add_step(step)
            return True
        set_meta(self._index, "tokens_written", written)
        return False

    def _add_step(self, step: int) -> None:
        """A damaged file counts as none: the page of a token says what is wrong with it."""
        try:
            turns = read_trained_tokens(self._trained_tokens, step)
        except RunStoreError:
            return
        sums: dict[int, NDArray[np.float64]] = {}
        sql = "SELECT id, session_id, logprobs FROM turns WHERE id IN (SELECT value FROM json_each(?))"
        for turn_id, session_id, logprobs in self._store.execute(sql, (json.dumps(list(turns)),)):
            rollout = self._rollout_of(session_id)
            engine_N = np.frombuffer(logprobs, np.float32)
            if rollout is None or len(engine_N) != len(turns[turn_id].trained_N):
                continue
            sums[rollout] = sums.get(rollout, np.zeros(4)) + _sums(turns[turn_id], engine_N)
        values = [
            (_share(advantages, tokens), _share(gaps, compared), rollout)
            for rollout, (advantages, tokens, gaps, compared) in sums.items()
        ]
        self._index.executemany("UPDATE rollouts SET advantage=?, gap=? WHERE id=?", values)

    # ------------------------------------------------------------------ what was said

    def _add_turns(self) -> bool:
        last_seq = meta_number(self._index, "turn_seq")
        read_bytes = 0
        newest_seq = 0
        for seq, session_id, logprobs, messages in self._store.execute(_NEW_TURNS, (last_seq, _TURN_BATCH)):
            newest_seq = seq
            self._add_turn(session_id, logprobs, messages)
            read_bytes += len(messages) + len(logprobs)
            if read_bytes > _TURN_BATCH_BYTES:
                break
        if not newest_seq:
            return False
        [turn_id] = self._store.execute("SELECT id FROM turns WHERE seq=?", (newest_seq,)).fetchone()
        set_meta(self._index, "turn_seq", newest_seq)
        set_meta(self._index, "turn_id", turn_id)
        return True

    def _add_turn(self, session_id: str, logprobs: bytes, messages: bytes) -> None:
        rollout = self._rollout_of(session_id)
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
        text = _said_in(messages)
        document = (rollout << TURN_BITS) + number
        self._index.execute("INSERT INTO said (rowid, text) VALUES (?,?)", (document, text))


def _sums(turn: TrainedTurn, engine_N: NDArray[np.float32]) -> NDArray[np.float64]:
    """Sum and number of the advantages of trained tokens, and of the gaps between engine and trainer."""
    gaps_N = np.abs(engine_N.astype(np.float64) - turn.logprobs_N)
    compared_N = turn.trained_N & np.isfinite(gaps_N)
    advantages_N = turn.advantages_N.astype(np.float64)
    return np.array(
        [
            advantages_N[turn.trained_N].sum(),
            turn.trained_N.sum(),
            gaps_N[compared_N].sum(),
            compared_N.sum(),
        ]
    )


def _share(total: float, count: float) -> float | None:
    if not count:
        return None
    return float(total / count)


def _said_in(messages: bytes) -> str:
    """The texts of a turn's messages; "" if they cannot be read."""
    try:
        decoded = msgspec.json.decode(messages, type=list[Message])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return "\n".join(message_text(message) for message in decoded)
