"""The gateway's side of the run's store: the only writer of sessions, rewards, turns
and outbox rows.

Each gateway worker has one writer. Invariants: a lease disappears and its session
appears in one transaction; so do a closed session's final state and its outbox row.
Writes reported by a future survive kill -9 of the process. (The file is in WAL mode: a
crash of the operating system may lose the last commits, never the file, and never what
a checkpoint names, because `LedgerStore.write` flushes the log before the checkpoint
appears.) Session keys are stored hashed. The buffer writes its ledger into the same
file; the two take turns through SQLite's busy timeout.
"""

import contextlib
import hashlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np

from invrl.errors import DiskFullError
from invrl.host.files.disk import full_disk, is_full
from invrl.host.output.traces import SpanPlace
from invrl.store.row_checksums import (
    ADD_CHECKSUM,
    delivered_item,
    experts_item,
    numbers_item,
    outcome_item,
    row_checksum,
    top_item,
    turn_item,
)
from invrl.store.rows import (
    EXPERTS_COLUMNS,
    OPENED_COLUMNS,
    TOP_COLUMNS,
    TURN_COLUMNS,
    RewardDeadline,
    StoredSession,
    experts_values,
    opened_values,
    top_values,
    turn_checksum,
    turn_values,
)
from invrl.store.schema import HEARTBEAT_TIMEOUT_S, busy_timeout_s, connect
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.rollouts import FailedRollout, Outcome
from invrl.types.routed_experts import RoutedExperts
from invrl.types.sessions import Reward
from invrl.types.top_logprobs import TopLogprobs
from invrl.types.turns import Segment, Turn

_log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_Statement = tuple[str, tuple[object, ...]]
_CHECKPOINT_EVERY = 200
"""Commits: about the 1,000 pages after which SQLite itself would checkpoint, within one
of the commits."""
_LONG_LOG = 16_000
"""Pages of 4 KiB."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Statements of one transaction, and the future of its caller."""

    statements: tuple[_Statement, ...]
    done: Future[None]
    waits: bool
    """Whether the work waits for the next commit if the disk is full. Otherwise its
    caller gets a DiskFullError."""


class _Command(Enum):
    """Work of the writer's thread other than commits."""

    CHECKPOINT = "checkpoint"
    END = "end"


class RunStoreWriter:
    """Writer for one thread, usually an event loop's, which never waits here: a commit
    takes 0.05 ms and is made immediately, so that the returned future is already done.
    Only while another process holds the database, or earlier work waits for that, does
    the writer's thread make the commit, together with everything that has arrived
    meanwhile. (With every commit in the thread, the loop learned of it after 1.4 ms,
    and after 26 ms for one in a hundred.) The thread also checkpoints: it moves the log
    into the file."""

    def __init__(
        self, path: Path, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        self._folder = path.parent
        self._told_full = False
        self._waiting: list[_Work] = []
        """Work that waits for space. Each transaction begins with it."""
        self._busy_timeout_s = busy_timeout_s(heartbeat_timeout_s)
        self._db = connect(path)
        self._patient = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        """Connection of the thread: it waits for other processes, `_db` does not."""
        self._db.execute("PRAGMA busy_timeout=0")
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        self._queue: queue.SimpleQueue[_Work | _Command] = queue.SimpleQueue()
        self._num_queued = 0
        self._num_processed = 0
        self._commits = 0
        self._thread = threading.Thread(
            target=self._run, name="run-store-writer", daemon=True
        )
        self._thread.start()

    def open_sessions(
        self, records: Sequence[StoredSession], *, leased: bool = False
    ) -> Future[None]:
        """Add all of the sessions or none. With `leased` each takes the place of its
        lease; if one has no taken lease, the future has an IntegrityError, because the
        session's key hash is NULL."""
        lease = (
            'FROM leases WHERE group_id=? AND "index"=? AND attempt=? AND taken_at IS NOT NULL '
            "AND json_extract(CAST(task AS TEXT), '$.id')=?"
        )
        key_hash = f"(SELECT ? {lease})" if leased else "?"
        statements: list[_Statement] = []
        for record in records:
            session = record.session
            claim: tuple[object, ...] = ()
            if leased:
                claim = (
                    session.group_id,
                    session.index,
                    session.attempt,
                    session.task_id,
                )
            opened = opened_values(record)
            marks = ",".join("?" * len(opened))
            insert = f"INSERT INTO sessions ({OPENED_COLUMNS}, key_hash) VALUES ({marks}, {key_hash})"
            statements.append((insert, (*opened, record.key_hash, *claim)))
            add_times = "INSERT INTO session_times (session_id, opened) VALUES (?,?)"
            statements.append((add_times, (session.id, record.awake_at_opening)))
            if leased:
                statements.append((f"DELETE {lease}", claim))
        return self._submit(statements)

    def add_turn(
        self,
        turn: Turn,
        messages: bytes,
        tools: bytes = b"[]",
        *,
        experts_TLK: RoutedExperts | None = None,
        top: TopLogprobs | None = None,
        trace: SpanPlace | None = None,
        stop: str = "",
        segments: Sequence[Segment] = (),
    ) -> Future[None]:
        """Add a turn. `messages` is JSON of the messages that the turn's tokens stand
        for, the reply last. `tools` is JSON of the tools that its conversation was
        rendered with. Equal tools are stored once, in `tool_lists`, and the turn's row
        has their digest: agents send the same 50 KB with every request. For
        `experts_TLK` and `top` see `Rollout.routed_experts` and `Rollout.top_logprobs`.
        `trace` is the turn's span, `stop` the client's stop string that ended the
        reply, `segments` the engines of a moved turn."""
        digest = hashlib.blake2b(tools, digest_size=16).digest()
        values = (*turn_values(turn), messages, digest)
        marks = ",".join("?" * len(values))
        add_tools = "INSERT OR IGNORE INTO tool_lists VALUES (?,?)"
        add_turn = (
            f"INSERT INTO turns ({TURN_COLUMNS}, messages, tools) VALUES ({marks})"
        )
        checksum = turn_checksum(turn_values(turn), messages, digest)
        statements: list[_Statement] = [
            (add_tools, (digest, tools)),
            (add_turn, values),
            (ADD_CHECKSUM, (turn_item(turn.id), checksum)),
        ]
        if experts_TLK is not None:
            sql = f"INSERT INTO routed_experts ({EXPERTS_COLUMNS}) VALUES (?,?,?,?,?)"
            of_experts = experts_values(turn.id, experts_TLK)
            statements += _add_checked(sql, of_experts, experts_item(turn.id))
        if top is not None:
            sql = f"INSERT INTO top_logprobs ({TOP_COLUMNS}) VALUES (?,?,?,?)"
            statements += _add_checked(sql, top_values(turn.id, top), top_item(turn.id))
        if trace is not None:
            add_trace = "INSERT INTO turn_traces VALUES (?,?,?)"
            statements.append((add_trace, (turn.id, trace.trace_id, trace.span_id)))
        if stop:
            add_stop = "INSERT INTO matched_stops VALUES (?,?)"
            statements.append((add_stop, (turn.id, stop)))
        add_segment = "INSERT INTO turn_segments VALUES (?,?,?,?)"
        for segment in segments:
            row = (turn.id, segment.start, segment.end, segment.engine)
            statements.append((add_segment, row))
        return self._submit(statements)

    def mark_delivered(self, turn_id: str) -> Future[None]:
        """Mark the turn's reply as sent to the client, who does not send it again: on
        a full disk the mark waits, and no later write becomes durable before it."""
        return self._submit(
            [
                ("UPDATE turns SET delivered=1 WHERE id=?", (turn_id,)),
                (ADD_CHECKSUM, (delivered_item(turn_id), b"")),
            ],
            waits=True,
        )

    def set_reward(self, session_id: str, reward: Reward) -> Future[None]:
        """Store the session's final reward, or that of a turn or of the trajectories
        through one."""
        components = _encode(reward.components)
        if reward.turn or reward.branch:
            of = "turn" if reward.turn else "branch"
            turn_id = reward.turn or reward.branch
            sql = "INSERT OR REPLACE INTO rewards VALUES (?,?,?,?,?)"
            values = (session_id, of, turn_id, reward.value, components)
            return self._submit([(sql, values)])
        sql = "UPDATE sessions SET reward=?, components=? WHERE id=?"
        return self._submit([(sql, (reward.value, components, session_id))])

    def add_numbers(self, session_id: str, extra: ExtraNumbers) -> Future[None]:
        """Store numbers of extra columns, in one transaction. An earlier number of the
        same turn and name is replaced. Numbers of tokens are stored as float32."""
        add_number = "INSERT OR REPLACE INTO numbers VALUES (?,?,?,?)"
        statements: list[_Statement] = [
            (add_number, (session_id, "", name, float(number)))
            for name, number in extra.numbers.items()
        ]
        for turn_id, turn_numbers in extra.turn_numbers.items():
            for name, number in turn_numbers.items():
                statements.append(
                    (add_number, (session_id, turn_id, name, float(number)))
                )
        add_numbers = "INSERT OR REPLACE INTO token_numbers VALUES (?,?,?)"
        for turn_id, token_numbers in extra.token_numbers.items():
            for name, numbers_T in token_numbers.items():
                content = np.asarray(numbers_T, np.float32).tobytes()
                statements.append((add_numbers, (turn_id, name, content)))
                statements.append(
                    (ADD_CHECKSUM, (numbers_item(turn_id, name), row_checksum(content)))
                )
        return self._submit(statements)

    def await_reward(self, session_id: str, deadline: RewardDeadline) -> Future[None]:
        """Mark the session as finished, with its reward due before `deadline`."""
        sql = "UPDATE sessions SET state='unrewarded', reward_deadline=? WHERE id=?"
        set_time = "UPDATE session_times SET reward_deadline=? WHERE session_id=?"
        return self._submit(
            [
                (sql, (deadline.unix_s, session_id)),
                (set_time, (deadline.awake_s, session_id)),
            ]
        )

    def close_session(
        self, session_id: str, state: str, outcome: Outcome, *, hand_over: bool
    ) -> Future[None]:
        """Store the session's final state, and with `hand_over` its outbox row, in one
        transaction."""
        body = _encode(outcome)
        sql = "UPDATE sessions SET state=?, outcome=?, reward_deadline=NULL WHERE id=?"
        forget_times = "DELETE FROM session_times WHERE session_id=?"
        statements: list[_Statement] = [
            (sql, (state, body, session_id)),
            (forget_times, (session_id,)),
            (ADD_CHECKSUM, (outcome_item(session_id), row_checksum(body))),
        ]
        if hand_over:
            failed = isinstance(outcome, FailedRollout)
            sql = "INSERT INTO outbox (session_id, failed, outcome) VALUES (?,?,?)"
            statements.append((sql, (session_id, failed, body)))
        return self._submit(statements)

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Commit queued work and end the thread."""
        self._queue.put(_Command.END)
        self._thread.join(deadline_s)
        self._db.close()

    def _submit(
        self, statements: Iterable[_Statement], *, waits: bool = False
    ) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # a caller that is cancelled does not take its commit back
        work = _Work(tuple(statements), done, waits)
        is_thread_busy = self._num_queued > self._num_processed
        if is_thread_busy or not self._commit(self._db, [work]):
            self._num_queued += 1
            self._queue.put(work)
        self._commits += 1
        if self._commits % _CHECKPOINT_EVERY == 0:
            self._queue.put(_Command.CHECKPOINT)
        return done

    # ----------------------------------------------------------------- the thread

    def _run(self) -> None:
        command = None
        while command is not _Command.END:
            batch, command = self._next_batch()
            if batch:
                self._commit(self._patient, batch)
                self._num_processed += len(batch)
            if command is _Command.CHECKPOINT:
                self._checkpoint()
        if self._waiting:
            self._commit(self._patient, [])
        self._patient.close()

    def _next_batch(self) -> tuple[list[_Work], _Command | None]:
        """Wait for work or a command. Returns all work that is queued before the next
        command, and that command if there is one."""
        batch: list[_Work] = []
        item = self._queue.get()
        while isinstance(item, _Work):
            batch.append(item)
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return batch, None
        return batch, item

    def _commit(self, db: sqlite3.Connection, batch: Sequence[_Work]) -> bool:
        """Commit the waiting work and all of `batch` in one transaction. If that fails,
        commit the works of the batch one by one, so that only the faulty one fails.
        Returns False if another process holds the database for longer than `db`
        waits."""
        try:
            db.execute("BEGIN IMMEDIATE")
            for work in (*self._waiting, *batch):
                for sql, values in work.statements:
                    db.execute(sql, values)
            db.execute("COMMIT")
        # Not only sqlite3.Error: SQLite may not have a type for a value, and the
        # transaction must not stay open then.
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if db is self._db and _is_busy(error):
                return False
            if len(batch) == 1:
                self._fail(batch[0], error)
            else:
                for work in batch:
                    self._commit(db, [work])
            return True
        self._told_full = False
        for work in (*self._waiting, *batch):
            work.done.set_result(None)
        self._waiting.clear()
        return True

    def _fail(self, work: _Work, error: Exception) -> None:
        """Give the caller the error, or let the work wait for space."""
        if is_full(error, self._folder):
            error = self._disk_full()
            if work.waits:
                self._waiting.append(work)
                return
        # The traceback holds the frame of the commit, the frame the future, and the
        # future would hold the error.
        work.done.set_exception(error.with_traceback(None))

    def _disk_full(self) -> DiskFullError:
        """Return the error for callers that wait for a commit. It is logged once until
        a commit succeeds again."""
        reason = full_disk(self._folder) or f"the disk of {self._folder} is full"
        if not self._told_full:
            self._told_full = True
            _log.error(
                "%s; turns wait, other requests are refused until there is space",
                reason,
            )
        return DiskFullError(reason)

    def _checkpoint(self) -> None:
        """Move the log into the file without blocking anybody. Only a long log is also
        truncated, for which writers wait up to 50 ms."""
        with contextlib.suppress(sqlite3.Error):
            _, pages, _ = self._patient.execute(
                "PRAGMA wal_checkpoint(PASSIVE)"
            ).fetchone()
            if (
                pages > _LONG_LOG
            ):  # nobody can write while the truncation waits for readers
                self._patient.execute("PRAGMA busy_timeout=50")
                self._patient.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._patient.execute(
                f"PRAGMA busy_timeout={int(1000 * self._busy_timeout_s)}"
            )


def _add_checked(
    sql: str, values: tuple[object, ...], item: str
) -> tuple[_Statement, _Statement]:
    """Return the statements that add a row and its checksum."""
    return (sql, values), (ADD_CHECKSUM, (item, row_checksum(*values)))


def _is_busy(error: Exception) -> bool:
    """Whether SQLite gave up because another process holds the database."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF == sqlite3.SQLITE_BUSY


def abandon_open_sessions(path: Path) -> None:
    """Mark open sessions as lost and remove all leases. Call it before a run continues:
    the processes that held its sessions are gone."""
    with contextlib.closing(connect(path)) as db:
        db.execute(
            "UPDATE sessions SET state='lost' WHERE state IN ('open', 'unrewarded')"
        )
        db.execute("DELETE FROM leases")
        db.execute("DELETE FROM session_times")
