"""Tasks on offer to environments that we do not start, in the run's store.

    offer (driver) ──► take (gateway: POST /tasks/lease) ──► `RunStoreWriter.open_sessions`: gone, as one
                         │                                   transaction with the session in its place
                         └── no session in time: expire (driver), which fails the member

Every call is one transaction and blocks: call it in a thread. The driver and any number of gateway workers
share it. Written by `rollout/lease_offers.py`, used by the gateway."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from invrl.run_store import connect
from invrl.types import FailedRollout, FailureReason, GroupLease, GroupMember, Task


class LeaseStore:
    """One connection, for any thread."""

    def __init__(self, path: Path) -> None:
        self._db = connect(path)
        self._lock = threading.Lock()

    def offer(self, lease: GroupLease) -> None:
        body = msgspec.json.encode(lease.task)
        with self._transaction() as db:
            (seq,) = db.execute("SELECT COALESCE(MAX(seq), 0) + 1 FROM leases").fetchone()
            rows = [(lease.group_id, m.index, m.attempt, seq, body) for m in lease.members]
            db.executemany("INSERT INTO leases VALUES (?,?,?,?,?,NULL)", rows)

    def take(self, now: float) -> GroupLease | None:
        """The oldest lease that nobody has taken; its members' sessions must be opened before it expires."""
        sql = "UPDATE leases SET taken_at=? WHERE seq=(SELECT MIN(seq) FROM leases WHERE taken_at IS NULL)"
        if not self._any("taken_at IS NULL"):
            return None
        with self._transaction() as db:
            rows = db.execute(sql + " RETURNING group_id, member, attempt, task", (now,)).fetchall()
        if not rows:
            return None
        members = sorted((index, attempt) for _, index, attempt, _ in rows)
        return GroupLease(
            group_id=rows[0][0],
            task=_task(rows[0][3]),
            members=tuple(GroupMember(index=index, attempt=attempt) for index, attempt in members),
        )

    def expire(self, before: float) -> list[FailedRollout]:
        """Takes back what was taken earlier than `before` and has no session: the members' outcomes."""
        sql = "DELETE FROM leases WHERE taken_at<? RETURNING group_id, member, attempt, task"
        if not self._any("taken_at<?", before):
            return []
        with self._transaction() as db:
            rows = db.execute(sql, (before,)).fetchall()
        return [
            FailedRollout(
                session_id="",
                task_id=_task(task).id,
                group_id=group_id,
                index=index,
                attempt=attempt,
                reason=FailureReason.TIMEOUT,
                detail="the lease ran out: no session was opened within lease_timeout_s",
            )
            for group_id, index, attempt, task in rows
        ]

    def withdraw(self) -> None:
        """Nothing is on offer any more."""
        with self._transaction() as db:
            db.execute("DELETE FROM leases WHERE taken_at IS NULL")

    def close(self) -> None:
        self._db.close()

    def _any(self, condition: str, *values: float) -> bool:
        """Asked before a transaction begins: who only looks takes no turn in writing."""
        with self._lock:
            sql = f"SELECT 1 FROM leases WHERE {condition} LIMIT 1"
            return self._db.execute(sql, values).fetchone() is not None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _task(body: bytes) -> Task:
    return Task(**msgspec.json.decode(body))  # msgspec does not know recursive types such as its payload's
