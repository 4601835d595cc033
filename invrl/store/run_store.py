"""The run's store: sessions, turns and the outbox, in one SQLite file.

The gateway alone writes sessions, rewards, turns and outbox rows (`RunStoreWriter`, one in each of its
workers); the buffer actor and the loop read in their own processes (`RunStore`), and so does a
gateway worker that takes up what its predecessor left. Invariants: a lease goes and its session comes in one
transaction; so do a closed session's final state and its outbox row; what a future of the writer reports as
done survives kill -9 of the process (WAL; an operating-system crash may lose the last commits, never the
file, and never what a checkpoint names: `LedgerStore.write` flushes the log before there is one). Session
keys are stored hashed. The ledger's tables are here too (`buffer/ledger_store.py`); its writer takes turns
with the gateway through the busy timeout."""

import contextlib
import hashlib
import json
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from invrl.host.private_file import make_private, restrict
from invrl.types import (
    FailedRollout,
    Outcome,
    Reward,
    Rollout,
    RolloutSummary,
    SampledSoFar,
    Sampling,
    Session,
    SessionLimits,
    TakenBatch,
    Trajectory,
    Turn,
    VersionSpan,
)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, key_hash BLOB NOT NULL UNIQUE, task_id TEXT NOT NULL, group_id TEXT NOT NULL,
  member INTEGER NOT NULL, attempt INTEGER NOT NULL, purpose TEXT NOT NULL, sampling BLOB NOT NULL,
  opened_at REAL NOT NULL, state TEXT NOT NULL, reward REAL, components BLOB, outcome BLOB,
  parent_id TEXT NOT NULL, limits BLOB NOT NULL, reward_deadline REAL);
CREATE INDEX IF NOT EXISTS live_sessions ON sessions (id) WHERE state IN ('open', 'unrewarded');
CREATE INDEX IF NOT EXISTS children ON sessions (parent_id) WHERE parent_id!='';
CREATE TABLE IF NOT EXISTS rewards (
  session_id TEXT NOT NULL, of TEXT NOT NULL, turn_id TEXT NOT NULL, reward REAL NOT NULL, components BLOB,
  PRIMARY KEY (session_id, of, turn_id));
CREATE TABLE IF NOT EXISTS leases (
  group_id TEXT NOT NULL, member INTEGER NOT NULL, attempt INTEGER NOT NULL, seq INTEGER NOT NULL,
  task BLOB NOT NULL, taken_at REAL, PRIMARY KEY (group_id, member, attempt));
CREATE TABLE IF NOT EXISTS turns (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, session_id TEXT NOT NULL, parent_id TEXT,
  context_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL, logprobs BLOB NOT NULL, spans BLOB NOT NULL,
  finish_reason TEXT NOT NULL, request_digest TEXT NOT NULL, delivered INTEGER NOT NULL,
  temperature REAL NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
  fork_reason TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL NOT NULL,
  constrained INTEGER NOT NULL, grammar TEXT NOT NULL, messages BLOB NOT NULL, tools BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS turns_of_session ON turns (session_id, seq);
CREATE TABLE IF NOT EXISTS tool_lists (digest BLOB PRIMARY KEY, tools BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outbox (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, failed INTEGER NOT NULL,
  outcome BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS incarnations (
  incarnation INTEGER PRIMARY KEY, parent INTEGER NOT NULL, step INTEGER NOT NULL, sequence INTEGER NOT NULL,
  started_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS flushes (incarnation INTEGER PRIMARY KEY, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS ledger (
  incarnation INTEGER NOT NULL, sequence INTEGER NOT NULL, group_id TEXT NOT NULL, member INTEGER NOT NULL,
  attempt INTEGER NOT NULL, task_id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT, failure TEXT,
  detail TEXT NOT NULL, batch_id INTEGER, session_id TEXT NOT NULL, at REAL NOT NULL,
  PRIMARY KEY (incarnation, sequence)) WITHOUT ROWID;
"""
_TURN_FIELDS = tuple(each.name for each in fields(Turn))
_TURN_COLUMNS = ", ".join(name.removesuffix("_T") for name in _TURN_FIELDS)
_TURN_ARRAYS = {"context_ids_T": np.int32, "sampled_ids_T": np.int32, "logprobs_T": np.float32}

_SESSION_COLUMNS = (
    "id, task_id, group_id, member, attempt, purpose, sampling, limits, parent_id, "
    "key_hash, opened_at, state, reward_deadline, reward, components, outcome"
)
_encode = msgspec.json.encode
_Statement = tuple[str, tuple[object, ...]]
_Work = tuple[tuple[_Statement, ...], Future[None]]
"""Statements that belong into one transaction, and who waits for it."""
_HEARTBEAT_TIMEOUT_S = 30.0
"""The default of `run.heartbeat_timeout_s`, for stores whose processes nobody watches."""
_CHECKPOINT = "checkpoint"
_CHECKPOINT_EVERY = 200
"""Commits: about the 1,000 pages after which SQLite itself would, within one of them."""
_LONG_LOG = 16_000
"""Pages of 4 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSession:
    """A session as it was committed. Its key is not in the store: `session.key` and its URL are empty."""

    session: Session
    key_hash: bytes
    opened_at: float
    state: str
    reward_deadline: float | None
    reward: float | None
    components: Mapping[str, float]
    turn_rewards: dict[str, Reward]
    branch_rewards: dict[str, Reward]
    outcome: Outcome | None


def busy_timeout_s(heartbeat_timeout_s: float) -> float:
    """How long a connection waits for another process that holds the store. One that is stopped within a
    commit holds it until it has been silent for `heartbeat_timeout_s` and is killed. If its supervisor is
    stopped too, that takes as long again."""
    return 2 * heartbeat_timeout_s + 30.0


def connect(path: Path, *, heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S) -> sqlite3.Connection:
    """Autocommit connection with the schema in place; whoever comes first creates the file. It waits for
    other processes as `busy_timeout_s` says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_private(path)  # SQLite gives its log and its index the same mode
    for ending in ("-wal", "-shm"):  # of an earlier version; whoever closes the store last removes them
        restrict(path.with_name(path.name + ending))
    timeout_s = busy_timeout_s(heartbeat_timeout_s)
    db = sqlite3.connect(path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.executescript(_SCHEMA)
    return db


def abandon_open_sessions(path: Path) -> None:
    """Before a run goes on: the processes that held its open sessions are gone, and its leases with them."""
    with contextlib.closing(connect(path)) as db:
        db.execute("UPDATE sessions SET state='lost' WHERE state IN ('open', 'unrewarded')")
        db.execute("DELETE FROM leases")


class RunStoreWriter:
    """The gateway's side. For one thread, as a rule an event loop's, which never waits here: a commit takes
    0.05 ms and is made at once, so that the future that a method returns is done. Only while another process
    holds the database, or behind what waits for that, a thread makes it, of all that came meanwhile as one.
    (Every commit in the thread: 1.4 ms until the loop knew, 26 ms for one in a hundred.) The thread moves the
    log into the file, too."""

    def __init__(self, path: Path, *, heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S) -> None:
        self._busy_timeout_s = busy_timeout_s(heartbeat_timeout_s)
        self._db = connect(path)
        self._patient = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._db.execute("PRAGMA busy_timeout=0")
        self._db.execute("PRAGMA wal_autocheckpoint=0")
        self._queue: queue.SimpleQueue[_Work | str | None] = queue.SimpleQueue()
        self._handed = self._done = 0
        """Works that the thread was given, and those that it has dealt with."""
        self._commits = 0
        self._thread = threading.Thread(target=self._run, name="run-store-writer", daemon=True)
        self._thread.start()

    def open_sessions(
        self,
        sessions: Sequence[Session],
        key_hashes: Sequence[bytes],
        opened_at: float,
        *,
        leased: bool = False,
    ) -> Future[None]:
        """All or none. With `leased` each takes the place of its lease, and where one has none that was
        taken, the future has an IntegrityError: no session key."""
        lease = "FROM leases WHERE group_id=? AND member=? AND attempt=? AND taken_at IS NOT NULL"
        lease += " AND json_extract(CAST(task AS TEXT), '$.id')=?"
        key_hash = f"(SELECT ? {lease})" if leased else "?"
        sql = f"INSERT INTO sessions VALUES (?,{key_hash},?,?,?,?,?,?,?,'open',NULL,NULL,NULL,?,?,NULL)"
        statements: list[_Statement] = []
        for one, key in zip(sessions, key_hashes, strict=True):
            claim = (one.group_id, one.index, one.attempt, one.task_id) if leased else ()
            place = (one.task_id, one.group_id, one.index, one.attempt, one.purpose)
            values = (*place, _encode(one.sampling), opened_at, one.parent_id, _encode(one.limits))
            statements.append((sql, (one.id, key, *claim, *values)))
            if leased:
                statements.append((f"DELETE {lease}", claim))
        return self._submit(statements)

    def add_turn(self, turn: Turn, messages: bytes, tools: bytes = b"[]") -> Future[None]:
        """`messages`: JSON of the messages that the turn's tokens stand for, the reply last; `tools`: of
        the tools that its conversation was rendered with. Equal tools are stored once, in `tool_lists`, and
        the turn's row has their digest: agents send the same 50 KB with every request."""
        row: dict[str, object] = {name: getattr(turn, name) for name in _TURN_FIELDS}
        for name, dtype in _TURN_ARRAYS.items():
            row[name] = np.ascontiguousarray(getattr(turn, name), dtype).tobytes()
        row["spans"] = _encode(turn.spans)
        marks = ",".join("?" * (len(row) + 2))
        digest = hashlib.blake2b(tools, digest_size=16).digest()
        add_tools = "INSERT OR IGNORE INTO tool_lists VALUES (?,?)"
        sql = f"INSERT INTO turns ({_TURN_COLUMNS}, messages, tools) VALUES ({marks})"
        return self._submit([(add_tools, (digest, tools)), (sql, (*row.values(), messages, digest))])

    def mark_delivered(self, turn_id: str) -> Future[None]:
        return self._submit([("UPDATE turns SET delivered=1 WHERE id=?", (turn_id,))])

    def set_reward(self, session_id: str, reward: Reward) -> Future[None]:
        """The final one, or that of a turn or of the branches through one."""
        value, components = reward.value, _encode(reward.components)
        if reward.turn or reward.branch:
            sql = "INSERT OR REPLACE INTO rewards VALUES (?,?,?,?,?)"
            of = ("turn", reward.turn) if reward.turn else ("branch", reward.branch)
            return self._submit([(sql, (session_id, *of, value, components))])
        sql = "UPDATE sessions SET reward=?, components=? WHERE id=?"
        return self._submit([(sql, (value, components, session_id))])

    def await_reward(self, session_id: str, deadline: float) -> Future[None]:
        """The session is finished, but for its reward."""
        sql = "UPDATE sessions SET state='unrewarded', reward_deadline=? WHERE id=?"
        return self._submit([(sql, (deadline, session_id))])

    def close_session(
        self, session_id: str, state: str, outcome: Outcome, *, hand_over: bool
    ) -> Future[None]:
        """The session's final state, and with `hand_over` its outbox row, in one transaction."""
        body = _encode(outcome)
        sql = "UPDATE sessions SET state=?, outcome=?, reward_deadline=NULL WHERE id=?"
        statements: list[_Statement] = [(sql, (state, body, session_id))]
        if hand_over:
            failed = isinstance(outcome, FailedRollout)
            sql = "INSERT INTO outbox (session_id, failed, outcome) VALUES (?,?,?)"
            statements.append((sql, (session_id, failed, body)))
        return self._submit(statements)

    def close(self, *, deadline_s: float = 30.0) -> None:
        """Commit what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(deadline_s)
        self._db.close()

    def _submit(self, statements: Iterable[_Statement]) -> Future[None]:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # who is cancelled while it waits takes no commit back
        work = (tuple(statements), done)
        if self._handed > self._done or not self._commit(self._db, [work]):
            self._handed += 1
            self._queue.put(work)
        self._commits += 1
        if self._commits % _CHECKPOINT_EVERY == 0:
            self._queue.put(_CHECKPOINT)
        return done

    def _run(self) -> None:
        item = self._queue.get()
        while item is not None:
            batch: list[_Work] = []
            while not (item is None or isinstance(item, str)):
                batch.append(item)
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    item = ""
            if batch:
                self._commit(self._patient, batch)
                self._done += len(batch)
            if item == _CHECKPOINT:
                self._checkpoint()
            item = self._queue.get() if item is not None else None
        self._patient.close()

    def _commit(self, db: sqlite3.Connection, batch: Sequence[_Work]) -> bool:
        """All of `batch` in one transaction; if it fails, one by one, so that only the culprit fails. False
        if another process holds the database, for longer than `db` waits."""
        try:
            db.execute("BEGIN IMMEDIATE")
            for statements, _ in batch:
                for sql, values in statements:
                    db.execute(sql, values)
            db.execute("COMMIT")
        except Exception as error:  # a value may be no SQLite's, and the transaction must not stay open
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
            if db is self._db and code & 0xFF == sqlite3.SQLITE_BUSY:
                return False
            if len(batch) == 1:
                # Its traceback holds this frame, the frame the future, and that would hold the error.
                batch[0][1].set_exception(error.with_traceback(None))
            else:
                for item in batch:
                    self._commit(db, [item])
            return True
        for _, done in batch:
            done.set_result(None)
        return True

    def _checkpoint(self) -> None:
        """Nobody waits for it, but where the log has become long: it is cut when nothing is written."""
        with contextlib.suppress(sqlite3.Error):
            _, pages, _ = self._patient.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages > _LONG_LOG:  # nobody can write while it waits for readers
                self._patient.execute("PRAGMA busy_timeout=50")
                self._patient.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._patient.execute(f"PRAGMA busy_timeout={int(1000 * self._busy_timeout_s)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentSession:
    """An open session, and the seconds since its last turn, or since it was opened if it has none."""

    session_id: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsOutside:
    """What a run waits for that environments are to do which it did not start."""

    offered: int
    """Rollouts that no environment has leased."""
    leased: int
    """Those that one has leased, and opened no session for."""
    sessions: tuple[SilentSession, ...]
    """Of the group that waits longest, those that are open; the most silent first."""


class RunStore:
    """The readers' side, for other processes than the gateway (and for tests)."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path)
        self._db.execute("PRAGMA query_only=1")

    def outbox_after(self, seq: int, limit: int = 1000) -> list[tuple[int, Outcome]]:
        """Outcomes handed over after row `seq` (0: all), in order, at most `limit`."""
        sql = "SELECT seq, failed, outcome FROM outbox WHERE seq>? ORDER BY seq LIMIT ?"
        return [
            (number, msgspec.json.decode(body, type=FailedRollout if failed else RolloutSummary))
            for number, failed, body in self._db.execute(sql, (seq, limit))
        ]

    def turns(self, session_id: str) -> list[Turn]:
        """All turns of a session, in the order of their commits."""
        sql = f"SELECT {_TURN_COLUMNS} FROM turns WHERE session_id=? ORDER BY seq"
        return [_turn(row) for row in self._db.execute(sql, (session_id,))]

    def recorded_turns(self, session_id: str) -> list[tuple[Turn, bytes, bytes]]:
        """As `turns`, each with the messages and tools that `RunStoreWriter.add_turn` was given."""
        sql = f"SELECT {_TURN_COLUMNS}, messages, tools FROM turns WHERE session_id=? ORDER BY seq"
        rows = self._db.execute(sql, (session_id,)).fetchall()
        sql = "SELECT digest, tools FROM tool_lists WHERE digest IN "
        sql += "(SELECT tools FROM turns WHERE session_id=?)"
        tools = dict(self._db.execute(sql, (session_id,)))
        recorded = []
        for *turn, messages, digest in rows:
            # A store from before there were digests has the tools themselves in the turn's row.
            recorded.append((_turn(tuple(turn)), messages, tools.get(digest, digest)))
        return recorded

    def rollout(self, session_id: str) -> Rollout:
        """A session that has ended with its branches; one that failed as its `partial` says. KeyError if it
        is unknown, open, or failed without a token to train."""
        sql = "SELECT outcome FROM sessions WHERE id=? AND outcome IS NOT NULL"
        row = self._db.execute(sql, (session_id,)).fetchone()
        if row is None:
            raise KeyError(f"no ended session {session_id}")
        outcome = _outcome(row[0])
        summary = outcome.partial if isinstance(outcome, FailedRollout) else outcome
        if summary is None:
            raise KeyError(f"session {session_id} failed without a token to train")
        turns = [turn for one in (session_id, *summary.child_rewards) for turn in self.turns(one)]
        return Rollout(summary=summary, trajectories=branches(turns))

    def rollouts(self, session_ids: Sequence[str]) -> list[Rollout]:
        return [self.rollout(session_id) for session_id in session_ids]

    def taken_rollouts(self, taken: TakenBatch) -> list[Rollout]:
        """The rollouts of a batch with their tokens, in the order of its groups. Each has the summary that
        the batch holds, whose reward the buffer may have given. KeyError as `rollout`."""
        summaries = [summary for group in taken.groups for summary in group.rollouts_G]
        return [replace(self.rollout(one.session_id), summary=one) for one in summaries]

    def without_tokens(self, summaries: Sequence[RolloutSummary]) -> set[str]:
        """Ids of those of these ended sessions that `rollout` could not give whole: the session is not there
        as ended, or has fewer turns, its children's among them, than its summary says."""
        lost: set[str] = set()
        for summary in summaries:
            sql = "SELECT 1 FROM sessions WHERE id=? AND outcome IS NOT NULL"
            ended = self._db.execute(sql, (summary.session_id,)).fetchone()
            family = (summary.session_id, *summary.child_rewards)
            marks = ",".join("?" * len(family))
            sql = f"SELECT COUNT(*) FROM turns WHERE session_id IN ({marks})"
            (turns,) = self._db.execute(sql, family).fetchone()
            if ended is None or turns < summary.num_turns:
                lost.add(summary.session_id)
        return lost

    def live_sessions(self, prefix: str = "") -> list[StoredSession]:
        """Sessions that are not over whose id begins with `prefix`, and all that descend from them, in the
        order of their opening."""
        sql = (
            "WITH RECURSIVE live(id) AS (SELECT id FROM sessions WHERE state IN ('open', 'unrewarded') "
            "AND id GLOB ? AND parent_id='' UNION ALL SELECT child.id FROM live JOIN sessions AS child "
            "ON child.parent_id=live.id WHERE child.parent_id!='') "
            f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE id IN live ORDER BY rowid"
        )
        return [self._session(row) for row in self._db.execute(sql, (prefix + "*",)).fetchall()]

    def open_sessions(self, group_id: str) -> list[Session]:
        """Training sessions of a group's members that are not over, without their keys and children."""
        sql = (
            f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE state IN ('open', 'unrewarded') "
            "AND group_id=? AND purpose='train' AND parent_id=''"
        )
        return [self._session(row).session for row in self._db.execute(sql, (group_id,)).fetchall()]

    def waits_outside(self, group_id: str, now: float) -> WaitsOutside:
        """What environments that we do not start hold of the run's leases, and the sessions of this group
        that they have not ended. `now`: Unix seconds."""
        counts = "SELECT COUNT(*) - COUNT(taken_at), COUNT(taken_at) FROM leases"
        offered, leased = self._db.execute(counts).fetchone()
        sessions = (
            "SELECT sessions.id, MAX(opened_at, COALESCE(MAX(turns.finished_at), 0)) FROM sessions "
            "LEFT JOIN turns ON turns.session_id=sessions.id WHERE state='open' AND purpose='train' "
            "AND sessions.parent_id='' AND group_id=? GROUP BY sessions.id ORDER BY 2"
        )
        return WaitsOutside(
            offered=offered,
            leased=leased,
            sessions=tuple(
                SilentSession(session_id=session_id, silent_s=now - last)
                for session_id, last in self._db.execute(sessions, (group_id,))
            ),
        )

    def sampled_so_far(self, group_ids: Sequence[str]) -> list[SampledSoFar]:
        """Of the running rollouts of these groups that have a turn to train: one that is committed, was
        delivered to its client, was not aborted, and was not constrained without a grammar to train under.
        Turns of children count with their rollout. A turn that is being generated is not known here."""
        sql = (
            "WITH RECURSIVE family(id, group_id, member, attempt) AS ("
            "SELECT id, group_id, member, attempt FROM sessions WHERE state IN ('open', 'unrewarded') "
            "AND purpose='train' AND parent_id='' AND group_id IN (SELECT value FROM json_each(?)) "
            "UNION ALL SELECT child.id, family.group_id, family.member, family.attempt FROM family "
            "JOIN sessions AS child ON child.parent_id=family.id WHERE child.parent_id!='' "
            "AND child.state NOT IN ('aborted', 'expired')) "
            "SELECT group_id, member, attempt, MIN(json_extract(span.value, '$.version')) FROM family "
            "JOIN turns ON turns.session_id=family.id JOIN json_each(CAST(turns.spans AS TEXT)) AS span "
            "WHERE delivered AND finish_reason!='abort' AND (NOT constrained OR grammar!='') "
            "AND json_extract(span.value, '$.end')>json_extract(span.value, '$.start') "
            "GROUP BY group_id, member, attempt"
        )
        rows = self._db.execute(sql, (json.dumps(list(group_ids)),)).fetchall()
        names = ("group_id", "index", "attempt", "oldest_version")
        return [SampledSoFar(**dict(zip(names, row, strict=True))) for row in rows]

    def closed_session(self, name: str | bytes) -> StoredSession | None:
        """A session with an outcome, by its id or by its key's hash."""
        column = "id" if isinstance(name, str) else "key_hash"
        sql = f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE {column}=? AND outcome IS NOT NULL"
        row = self._db.execute(sql, (name,)).fetchone()
        return None if row is None else self._session(row)

    def ended_sessions(self) -> Iterator[StoredSession]:
        """Every session with an outcome that no other session opened, in the order of their opening."""
        sql = (
            f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE outcome IS NOT NULL AND parent_id='' "
            "ORDER BY rowid"
        )
        for row in self._db.execute(sql):
            yield self._session(row)

    def family(self, session_id: str) -> list[str]:
        """The session and all that descend from it, in the order of their opening."""
        sql = (
            "WITH RECURSIVE family(id) AS (SELECT ? UNION ALL SELECT child.id FROM family "
            "JOIN sessions AS child ON child.parent_id=family.id WHERE child.parent_id!='') "
            "SELECT id FROM sessions WHERE id IN family ORDER BY rowid"
        )
        return [name for (name,) in self._db.execute(sql, (session_id,))]

    def close(self) -> None:
        self._db.close()

    def _session(self, row: tuple[Any, ...]) -> StoredSession:
        *place, sampling, limits, parent_id, key_hash, opened_at, state, due, reward, parts, outcome = row
        names = ("id", "task_id", "group_id", "index", "attempt", "purpose")
        values: dict[str, Any] = dict(zip(names, place, strict=True)) | {"key": "", "base_url": ""}
        values |= {"limits": msgspec.json.decode(limits, type=SessionLimits), "parent_id": parent_id}
        sql = "SELECT of, turn_id, reward, components FROM rewards WHERE session_id=?"
        own: dict[str, dict[str, Reward]] = {"turn": {}, "branch": {}}
        for of, turn_id, value, components in self._db.execute(sql, (values["id"],)):
            own[of][turn_id] = Reward(value=value, components=_components(components), **{of: turn_id})
        return StoredSession(
            session=Session(**values, sampling=msgspec.json.decode(sampling, type=Sampling)),
            key_hash=key_hash,
            opened_at=opened_at,
            state=state,
            reward_deadline=due,
            reward=reward,
            components=_components(parts),
            turn_rewards=own["turn"],
            branch_rewards=own["branch"],
            outcome=None if outcome is None else _outcome(outcome),
        )


def branches(turns: Sequence[Turn]) -> tuple[Trajectory, ...]:
    """Root-to-leaf paths through the turns of one session, in the order of their leaves. Turns that
    were aborted or never delivered are in them; what may be trained is for the reader to say."""
    by_id = {turn.id: turn for turn in turns}
    inner = {turn.parent_id for turn in turns}
    paths = []
    for leaf in turns:
        if leaf.id in inner:
            continue
        path = [leaf]
        while path[-1].parent_id is not None:
            path.append(by_id[path[-1].parent_id])
        paths.append(Trajectory(turns=tuple(reversed(path))))
    return tuple(paths)


def _components(body: bytes | None) -> dict[str, float]:
    return msgspec.json.decode(body, type=dict[str, float]) if body else {}


def _outcome(body: bytes) -> Outcome:
    try:
        return msgspec.json.decode(body, type=RolloutSummary)
    except msgspec.ValidationError:
        return msgspec.json.decode(body, type=FailedRollout)


def _turn(row: tuple[Any, ...]) -> Turn:
    values: dict[str, Any] = dict(zip(_TURN_FIELDS, row, strict=True))
    values |= {name: np.frombuffer(values[name], dtype) for name, dtype in _TURN_ARRAYS.items()}
    values["spans"] = msgspec.json.decode(values["spans"], type=tuple[VersionSpan, ...])
    values |= {name: bool(values[name]) for name in ("delivered", "constrained")}
    return Turn(**values)
