"""Tasks offered to environments that we do not start, in the run's store.

    offer (driver) ──► take (gateway: POST /tasks/lease) ──► `RunStoreWriter.open_sessions` removes the lease
                         │                                   and adds its session in one transaction
                         └── taken, and no session in time: expire (driver), and the rollout has failed

Every change is one statement, so one transaction. Calls block, so make them in a
thread. The driver and any number of gateway workers share the leases.
"""

import itertools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from invrl.errors import UnsendableTaskError
from invrl.store.schema import HEARTBEAT_TIMEOUT_S, connect
from invrl.types.leases import GroupLease, GroupMember, Place
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.tasks import Task

_RETURNED = 'RETURNING group_id, "index", attempt, task'
_Row = tuple[Any, ...]


class LeaseStore:
    """Leases over one connection, which any thread may use."""

    def __init__(
        self, path: Path, *, heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    ) -> None:
        """`heartbeat_timeout_s` is described at `busy_timeout_s`."""
        self.folder = path.parent
        self._db = connect(path, heartbeat_timeout_s=heartbeat_timeout_s)
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def offer(self, lease: GroupLease) -> None:
        """Offer a lease after those that this process has offered before. Raises
        UnsendableTaskError."""
        task = encoded_task(lease.task)
        number = next(self._numbers)
        values: list[object] = []
        for member in lease.members:
            values += [lease.group_id, member.index, member.attempt, number, task]
        marks = ",".join(["(?,?,?,?,?,NULL)"] * len(lease.members))
        self._run(f"INSERT INTO leases VALUES {marks}", *values)

    def take(self, now: float) -> GroupLease | None:
        """Take the oldest free lease. The sessions of its members must be opened before
        it expires. `now` is in Unix seconds, for people."""
        if not self._any("taken_at IS NULL"):
            return None
        oldest = "(SELECT MIN(seq) FROM leases WHERE taken_at IS NULL)"
        rows = self._run(
            f"UPDATE leases SET taken_at=? WHERE taken_at IS NULL AND seq={oldest} {_RETURNED}",
            now,
        )
        if not rows:  # another worker was faster
            return None
        places = sorted((index, attempt) for _, index, attempt, _ in rows)
        group_id, _, _, task = rows[0]
        return GroupLease(
            group_id=group_id,
            task=_task_from_json(task),
            members=tuple(
                GroupMember(index=index, attempt=attempt) for index, attempt in places
            ),
        )

    def taken(self) -> list[Place]:
        """Return the places of taken leases without a session."""
        rows = self._run(
            'SELECT group_id, "index", attempt FROM leases WHERE taken_at IS NOT NULL'
        )
        return [Place(*row) for row in rows]

    def expire(self, places: Iterable[Place]) -> list[FailedRollout]:
        """Remove the leases of these places, whose sessions were not opened in time.
        Returns a failure for each that still had none."""
        rows: list[_Row] = []
        delete = (
            'DELETE FROM leases WHERE group_id=? AND "index"=? AND attempt=? AND taken_at IS NOT NULL '
            f"{_RETURNED}"
        )
        with self._lock, self._db:  # all of them, or an error and none
            self._db.execute("BEGIN IMMEDIATE")
            for place in places:
                values = (place.group_id, place.index, place.attempt)
                rows += self._db.execute(delete, values).fetchall()
        return [
            FailedRollout(
                session_id="",
                task_id=_task_from_json(task).id,
                group_id=group_id,
                index=index,
                attempt=attempt,
                reason=FailureReason.TIMEOUT,
                detail="the lease ran out: no session was opened within session.lease_timeout_s",
            )
            for group_id, index, attempt, task in rows
        ]

    def revoke(self, group_id: str) -> None:
        """Remove the leases of a dropped group: they can no longer be taken, nor
        sessions be opened for the taken ones."""
        self._run("DELETE FROM leases WHERE group_id=?", group_id)

    def withdraw(self) -> None:
        """Remove every lease that was not taken."""
        self._run("DELETE FROM leases WHERE taken_at IS NULL")

    def close(self) -> None:
        self._db.close()

    def _any(self, condition: str) -> bool:
        """Whether a lease meets the condition. Checked before a change, because a
        SELECT does not wait for other writing processes."""
        return bool(self._run(f"SELECT 1 FROM leases WHERE {condition} LIMIT 1"))

    def _run(self, sql: str, *values: object) -> list[_Row]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()


def encoded_task(task: Task) -> bytes:
    """Return the task as JSON. Raises UnsendableTaskError if JSON cannot hold it."""
    try:
        return msgspec.json.encode(task)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsendableTaskError(
            f"task {task.id} cannot be sent as JSON: {error}"
        ) from error


def _task_from_json(body: bytes) -> Task:
    # Not `type=Task`: msgspec does not support recursive types such as that of the
    # payload.
    return Task(**msgspec.json.decode(body))
