"""The run's store as its readers see it: sessions, turns and the outbox, in one SQLite
file.

The gateway writes them (`run_store_writer.py`). Readers in other processes are the
buffer actor, the loop, the commands that show a run, and a gateway worker that takes
over the sessions of its predecessor. The tables are in `schema.py`.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from invrl.errors import DamagedFileError
from invrl.host.output.traces import SpanPlace
from invrl.store.row_checksums import (
    delivered_item,
    experts_item,
    numbers_item,
    row_checksum,
    top_item,
    turn_item,
    whole_outcome,
)
from invrl.store.rows import (
    SESSION_COLUMNS,
    TOP_COLUMNS,
    TURN_COLUMNS,
    RewardDeadline,
    StoredSession,
    experts_from_row,
    outcome_from_json,
    session_from_row,
    top_from_row,
    turn_checksum,
    turn_from_row,
)
from invrl.store.run_store_queries import (
    CHECKSUMS_OF_TURNS,
    ENDED_SESSIONS,
    ENDED_TURNS,
    FAMILY,
    LIVE_SESSIONS,
    MATCHED_STOPS,
    OPEN_SESSIONS,
    OUTBOX,
    OUTCOME,
    RECORDED_TURNS,
    ROUTED_EXPERTS,
    SAMPLED_SO_FAR,
    SESSION_TIMES,
    SILENT_SESSIONS,
    TOKEN_NUMBERS,
    TOOLS,
    TOP_LOGPROBS,
    TURN_SEGMENTS,
    WHOLE_TURNS,
)
from invrl.store.schema import connect
from invrl.types.batches import TakenBatch
from invrl.types.leases import Place
from invrl.types.rollouts import (
    FailedRollout,
    Outcome,
    Rollout,
    RolloutSummary,
    SampledSoFar,
)
from invrl.types.sessions import Session
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import Segment, Trajectory, Turn, is_trainable
from invrl.types.weights import WeightVersion

_DELIVERED = TURN_COLUMNS.split(", ").index("delivered")
RecordT = TypeVar("RecordT")
_Check = Callable[..., None]
"""Checks an item's checksum against the values of its row. Raises DamagedFileError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTurns:
    """Turns that were recorded after another one."""

    sequence: int
    """Number of the last of them; of the other one if there is none."""
    seconds: tuple[float, ...]
    """Duration of each."""
    prompt_tokens: int
    cached_tokens: int
    sampled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentSession:
    """An open session, and the seconds since its last turn, or since its opening if it
    has none."""

    session_id: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalWaits:
    """Work that a run awaits from environments that it did not start."""

    offered: int
    """Rollouts that no environment has leased."""
    leased: int
    """Rollouts that an environment has leased, without a session yet."""
    sessions: tuple[SilentSession, ...]
    """Open sessions of the group that has waited longest; the most silent first."""


class RunStore:
    """Reader of the store, for any process."""

    def __init__(self, path: Path) -> None:
        self._use(connect(path))

    @classmethod
    def through(cls, db: sqlite3.Connection) -> "RunStore":
        """Return a reader that uses a connection of the caller, who closes it."""
        store = cls.__new__(cls)
        store._use(db)
        return store

    def _use(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._db.execute("PRAGMA query_only=1")
        self._db.create_function("is_trainable", 3, is_trainable, deterministic=True)

    def outbox_after(self, seq: int, limit: int = 1000) -> list[tuple[int, Outcome]]:
        """Return at most `limit` outcomes handed over after row `seq` (0: all), in
        order, with their row numbers."""
        rows = self._db.execute(OUTBOX, (seq, limit)).fetchall()
        return [
            (number, self._outcome(session_id, bodies, checksum))
            for number, session_id, *bodies, checksum in rows
        ]

    def _outcome(
        self, session_id: str, bodies: Sequence[bytes | None], checksum: bytes | None
    ) -> Outcome:
        """Return the outcome that was written into these places. Raises
        DamagedFileError."""
        copies = [body for body in bodies if body is not None]
        body = whole_outcome(copies, checksum)
        if body is None:
            raise self._damaged(f"the outcome of session {session_id}")
        try:
            return outcome_from_json(body)
        except msgspec.MsgspecError as error:
            raise self._damaged(f"the outcome of session {session_id}") from error

    def _damaged(self, row: str) -> DamagedFileError:
        (path,) = self._db.execute(
            "SELECT file FROM pragma_database_list WHERE name='main'"
        ).fetchone()
        fix = "copy back a run.sqlite that was saved with the checkpoints, or begin a new run (--run-name NEW)"
        return DamagedFileError(Path(path), f"{row} is not what was written", fix)

    # -------------------------------------------------------------- turns and rollouts

    def turns(self, session_id: str) -> list[Turn]:
        """Return all turns of a session, in the order of their commits."""
        sql = f"SELECT {TURN_COLUMNS} FROM turns WHERE session_id=? ORDER BY seq"
        return [turn_from_row(row) for row in self._db.execute(sql, (session_id,))]

    def last_turn(self) -> int:
        """Return the number of the last recorded turn; 0 without one."""
        (sequence,) = self._db.execute(
            "SELECT COALESCE(MAX(seq), 0) FROM turns"
        ).fetchone()
        return sequence

    def ended_turns(self, after: int) -> EndedTurns:
        """Return times and lengths of the turns that were recorded after number
        `after`. No array is read."""
        rows = self._db.execute(ENDED_TURNS, (after,)).fetchall()
        return EndedTurns(
            sequence=max([after, *(row[0] for row in rows)]),
            seconds=tuple(row[1] for row in rows),
            prompt_tokens=sum(row[2] for row in rows),
            cached_tokens=sum(row[3] for row in rows),
            sampled_tokens=sum(row[4] for row in rows) // np.dtype(np.int32).itemsize,
        )

    def recorded_turns(self, *session_ids: str) -> list[tuple[Turn, bytes, bytes]]:
        """Return the turns of these sessions in the order of their commits, each with
        the messages and tools given to `RunStoreWriter.add_turn`."""
        names = json.dumps(session_ids)
        # The turns are read first: the tools of a turn are committed with it, so none
        # can be missing then.
        rows = self._db.execute(RECORDED_TURNS, (names,)).fetchall()
        tools_by_digest = dict(self._db.execute(TOOLS, (names,)))
        return [
            (turn_from_row(turn_row), messages, tools_by_digest[digest])
            for *turn_row, messages, digest in rows
        ]

    def rollout(self, session_id: str) -> Rollout:
        """Return an ended session with its trajectories. The summary of a failed
        session is its `partial`. Raises KeyError if it is unknown, still open, or
        failed without a token to train; DamagedFileError if its rows differ from what
        was written."""
        rollout, _ = self._whole_rollout(session_id)
        return rollout

    def _whole_rollout(self, session_id: str) -> tuple[Rollout, dict[str, bytes]]:
        """Return the result of `rollout`, and the checksums of what was recorded with
        its turns, by item."""
        row = self._db.execute(OUTCOME, (session_id,)).fetchone()
        if row is None:
            raise KeyError(f"no ended session {session_id}")
        *bodies, checksum = row
        summary = self._outcome(session_id, bodies, checksum)
        if isinstance(summary, FailedRollout):
            summary = summary.partial
        if summary is None:
            raise KeyError(f"session {session_id} failed without a token to train")
        rows: list[Sequence[Any]] = []
        for member_id in (session_id, *summary.child_rewards):
            rows += self._db.execute(WHOLE_TURNS, (member_id,)).fetchall()
        untested = self._turn_checksums([turn_id for turn_id, *_ in rows])
        turns: list[Turn] = []
        for *turn_row, messages, tools_digest in rows:
            turn_id = turn_row[0]
            found = turn_checksum(turn_row, messages, tools_digest)
            is_marked = untested.pop(delivered_item(turn_id), None) is not None
            if (
                untested.pop(turn_item(turn_id), None) != found
                or turn_row[_DELIVERED] != is_marked
            ):
                raise self._damaged(f"turn {turn_id} of session {turn_row[1]}")
            turns.append(turn_from_row(turn_row))
        return Rollout(summary=summary, trajectories=trajectories(turns)), untested

    def _turn_checksums(self, turn_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the checksums of these turns and of what was recorded with them, by
        item."""
        names = json.dumps(turn_ids)
        return dict(self._db.execute(CHECKSUMS_OF_TURNS, (names, names)))

    def taken_rollouts(self, taken: TakenBatch) -> list[Rollout]:
        """Return the rollouts of a batch with their tokens and recorded data, in the
        order of its groups. Raises KeyError and DamagedFileError like `rollout`."""
        return [
            self._with_tokens(summary)
            for group in taken.groups
            for summary in group.rollouts_G
        ]

    def _with_tokens(self, summary: RolloutSummary) -> Rollout:
        """Return the rollout with all its training data, and with the caller's summary,
        whose reward may come from the buffer."""
        rollout, untested = self._whole_rollout(summary.session_id)
        family = [summary.session_id, *summary.child_rewards]

        def check(item: str, *values: object) -> None:
            if untested.pop(item, None) != row_checksum(*values):
                raise self._damaged(item)

        with_tokens = replace(
            rollout,
            summary=summary,
            routed_experts=self._by_turn(
                ROUTED_EXPERTS, family, experts_item, experts_from_row, check
            ),
            token_numbers=self._token_numbers(family, check),
            top_logprobs=self._by_turn(
                TOP_LOGPROBS, family, top_item, top_from_row, check
            ),
        )
        if untested:
            raise self._damaged(f"{next(iter(untested))} is missing or")
        return with_tokens

    def _by_turn(
        self,
        sql: str,
        session_ids: Sequence[str],
        item: Callable[[str], str],
        read: Callable[[Sequence[Any]], RecordT],
        check: _Check,
    ) -> dict[str, RecordT]:
        """Return what was recorded with each turn of these sessions, by turn id. `item`
        names the checksum of a row, `read` builds the record from it."""
        rows = self._db.execute(sql, (json.dumps(session_ids),)).fetchall()
        for row in rows:
            check(item(row[0]), *row)
        return {row[0]: read(row) for row in rows}

    def _token_numbers(
        self, session_ids: Sequence[str], check: _Check
    ) -> dict[str, dict[str, NDArray[np.float32]]]:
        """Return the given numbers by turn id and name."""
        token_numbers: dict[str, dict[str, NDArray[np.float32]]] = {}
        for turn_id, name, content in self._db.execute(
            TOKEN_NUMBERS, (json.dumps(session_ids),)
        ):
            check(numbers_item(turn_id, name), content)
            token_numbers.setdefault(turn_id, {})[name] = np.frombuffer(
                content, np.float32
            )
        return token_numbers

    def top_logprobs(self, turn_id: str) -> TopLogprobs | None:
        """Return the likeliest tokens of one turn; None if they were not recorded."""
        row = self._db.execute(
            f"SELECT {TOP_COLUMNS} FROM top_logprobs WHERE turn_id=?", (turn_id,)
        ).fetchone()
        if row is None:
            return None
        return top_from_row(row)

    def matched_stops(self, *session_ids: str) -> dict[str, str]:
        """Return the clients' stop strings that ended replies of these sessions, by
        turn id."""
        rows = self._db.execute(MATCHED_STOPS, (json.dumps(session_ids),))
        return dict(rows.fetchall())

    def turn_segments(self, *session_ids: str) -> dict[str, tuple[Segment, ...]]:
        """Return the engines of the moved turns of these sessions, by turn id."""
        segments: dict[str, tuple[Segment, ...]] = {}
        rows = self._db.execute(TURN_SEGMENTS, (json.dumps(session_ids),))
        for turn_id, engine, start, end in rows:
            segment = Segment(engine=engine, start=start, end=end)
            segments[turn_id] = (*segments.get(turn_id, ()), segment)
        return segments

    def turn_traces(self, turn_ids: Sequence[str]) -> dict[str, SpanPlace]:
        """Return the spans of these turns, for those that have one, by turn id."""
        sql = "SELECT * FROM turn_traces WHERE turn_id IN (SELECT value FROM json_each(?))"
        rows = self._db.execute(sql, (json.dumps(list(turn_ids)),))
        return {
            turn_id: SpanPlace(trace_id, span_id) for turn_id, trace_id, span_id in rows
        }

    def without_tokens(self, summaries: Sequence[RolloutSummary]) -> dict[str, str]:
        """Return the errors of rollouts that `taken_rollouts` could not return whole,
        by session id: the store does not have the session as ended, has fewer turns of
        it and its children than its summary counts, or has other bytes than were
        written."""
        faults = {summary.session_id: self._fault(summary) for summary in summaries}
        return {session_id: fault for session_id, fault in faults.items() if fault}

    def _fault(self, summary: RolloutSummary) -> str:
        """Describe the error; "" if there is none."""
        try:
            rollout = self._with_tokens(summary)
        except DamagedFileError as error:
            return error.reason
        except (KeyError, ValueError, msgspec.MsgspecError) as error:
            return str(error)
        turns = {
            turn.id for trajectory in rollout.trajectories for turn in trajectory.turns
        }
        if len(turns) < summary.num_turns:
            return f"it has {len(turns)} of the {summary.num_turns} turns of session {summary.session_id}"
        return ""

    # ----------------------------------------------------------------- sessions

    def live_sessions(self, prefix: str = "") -> list[StoredSession]:
        """Return live sessions whose id begins with `prefix`, and all their
        descendants, in the order of opening."""
        rows = self._db.execute(LIVE_SESSIONS, (prefix + "*",)).fetchall()
        sessions = [self._session(row) for row in rows]
        for session in sessions:
            times = self._db.execute(SESSION_TIMES, (session.session.id,)).fetchone()
            if times is None:
                continue
            session.awake_at_opening, awake_s, unix_s = times
            if awake_s is not None:
                session.reward_deadline = RewardDeadline(awake_s=awake_s, unix_s=unix_s)
        return sessions

    def open_sessions(self, group_id: str) -> list[Session]:
        """Return live training sessions of a group, without their keys and without
        child sessions."""
        rows = self._db.execute(OPEN_SESSIONS, (group_id,)).fetchall()
        return [self._session(row).session for row in rows]

    def closed_session(self, name: str | bytes) -> StoredSession | None:
        """Return a session that has an outcome, by its id (str) or the hash of its key
        (bytes)."""
        column = "id" if isinstance(name, str) else "key_hash"
        return self._session_where(f"{column}=? AND outcome IS NOT NULL", name)

    def session(self, session_id: str) -> StoredSession | None:
        """Return the session of this id, in any state."""
        return self._session_where("id=?", session_id)

    def _session_where(
        self, condition: str, value: str | bytes
    ) -> StoredSession | None:
        sql = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {condition}"
        row = self._db.execute(sql, (value,)).fetchone()
        if row is None:
            return None
        return self._session(row)

    def ended_sessions(self) -> Iterator[StoredSession]:
        """Yield every top-level session with an outcome, in the order of opening."""
        for row in self._db.execute(ENDED_SESSIONS):
            yield self._session(row)

    def family(self, session_id: str) -> list[str]:
        """Return the ids of the session and all its descendants, in the order of
        opening."""
        return [member_id for (member_id,) in self._db.execute(FAMILY, (session_id,))]

    # ---------------------------------------------------------------- running rollouts

    def external_waits(self, group_id: str, now: float) -> ExternalWaits:
        """Return what environments that we did not start hold of the run's leases, and
        the open sessions of this group. `now` is in Unix seconds."""
        count_leases = "SELECT COUNT(*) - COUNT(taken_at), COUNT(taken_at) FROM leases"
        offered, leased = self._db.execute(count_leases).fetchone()
        sessions = tuple(
            SilentSession(session_id=session_id, silent_s=max(now - last_sign, 0.0))
            for session_id, last_sign in self._db.execute(SILENT_SESSIONS, (group_id,))
        )
        return ExternalWaits(offered=offered, leased=leased, sessions=sessions)

    def sampled_so_far(self, group_ids: Sequence[str]) -> list[SampledSoFar]:
        """Return the running rollouts of these groups that have a committed, delivered
        turn to train (`types.is_trainable`). Turns of child sessions count for their
        rollout. A turn that is still being generated is not in the store."""
        rows = self._db.execute(
            SAMPLED_SO_FAR, (json.dumps(list(group_ids)),)
        ).fetchall()
        return [
            SampledSoFar(
                place=Place(group_id, index, attempt),
                oldest_version=WeightVersion(oldest_version),
            )
            for group_id, index, attempt, oldest_version in rows
        ]

    def close(self) -> None:
        self._db.close()

    def _session(self, row: Sequence[Any]) -> StoredSession:
        session_id = row[0]  # the first of SESSION_COLUMNS
        sql = "SELECT of, turn_id, reward, components FROM rewards WHERE session_id=?"
        rewards = self._db.execute(sql, (session_id,)).fetchall()
        sql = "SELECT turn_id, name, number FROM numbers WHERE session_id=?"
        numbers = self._db.execute(sql, (session_id,)).fetchall()
        return session_from_row(row, rewards, numbers)


def trajectories(turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    """Return root-to-leaf paths through the turns of sessions, in the order of their
    leaves. Aborted and undelivered turns are included; the reader decides what may be
    trained."""
    by_id = {turn.id: turn for turn in turns}
    ids_of_parents = {turn.parent_id for turn in turns}
    paths: list[Trajectory] = []
    for leaf in turns:
        if leaf.id in ids_of_parents:
            continue
        path = [leaf]
        while path[-1].parent_id is not None:
            path.append(by_id[path[-1].parent_id])
        paths.append(Trajectory(turns=tuple(reversed(path))))
    return tuple(paths)
