"""Tasks on offer to environments that we do not start, in the run's store.

    offer (driver) ──► take (gateway: POST /tasks/lease) ──► `RunStoreWriter.open_sessions`: gone, as one
                         │                                   transaction with the session in its place
                         └── no session in time: expire (driver), which fails the member

Every change is one statement, so one transaction, and blocks: call it in a thread. The driver and any number
of gateway workers share it."""

import itertools
import threading
from pathlib import Path
from typing import Any

import msgspec

from invrl.errors import UnsendableTask
from invrl.store.run_store import connect
from invrl.types import FailedRollout, FailureReason, GroupLease, GroupMember, Task

_RETURNED = "RETURNING group_id, member, attempt, task"


class LeaseStore:
    """One connection, for any thread."""

    def __init__(self, path: Path, *, heartbeat_timeout_s: float = 30.0) -> None:
        """`heartbeat_timeout_s`: see `busy_timeout_s`."""
        self._db = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def offer(self, lease: GroupLease) -> None:
        """By one process, whose order is kept. Raises UnsendableTask."""
        task = encoded_task(lease.task)
        seq = next(self._numbers)
        rows = [(lease.group_id, m.index, m.attempt, seq, task) for m in lease.members]
        values = ",".join(["(?,?,?,?,?,NULL)"] * len(rows))
        self._run(f"INSERT INTO leases VALUES {values}", *itertools.chain(*rows))

    def take(self, now: float) -> GroupLease | None:
        """The oldest lease that nobody has taken; its members' sessions must be opened before it expires."""
        oldest = "(SELECT MIN(seq) FROM leases WHERE taken_at IS NULL)"
        sql = f"UPDATE leases SET taken_at=? WHERE taken_at IS NULL AND seq={oldest}"
        rows = self._run(f"{sql} {_RETURNED}", now) if self._any("taken_at IS NULL") else []
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
        sql = f"DELETE FROM leases WHERE taken_at<? {_RETURNED}"
        rows = self._run(sql, before) if self._any("taken_at<?", before) else []
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

    def revoke(self, group_id: str) -> None:
        """The group was dropped: nobody can take its members any more, or open what was taken."""
        self._run("DELETE FROM leases WHERE group_id=?", group_id)

    def withdraw(self) -> None:
        """Nothing is on offer any more."""
        self._run("DELETE FROM leases WHERE taken_at IS NULL")

    def close(self) -> None:
        self._db.close()

    def _any(self, condition: str, *values: float) -> bool:
        """Asked before a change: who only looks takes no turn in writing."""
        return bool(self._run(f"SELECT 1 FROM leases WHERE {condition} LIMIT 1", *values))

    def _run(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def encoded_task(task: Task) -> bytes:
    """The task as JSON. Raises UnsendableTask."""
    try:
        return msgspec.json.encode(task)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsendableTask(f"task {task.id} cannot be sent as JSON: {error}") from error


def _task(body: bytes) -> Task:
    return Task(**msgspec.json.decode(body))  # msgspec does not know recursive types such as its payload's
