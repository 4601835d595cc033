"""Hands the buffer's leases to environments that we do not start, instead of the
dispatcher.

An environment takes a lease over HTTP and opens its sessions. If it does not open them
in time, the rollouts have failed, and the buffer leases them again. When the buffer
drops a group, its leases are removed and its open sessions are aborted; later calls in
those sessions say so. Outcomes reach the buffer through the gateway's outbox.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from invrl.errors import UnsendableTaskError
from invrl.host.files.disk_waits import written_in_thread
from invrl.host.processes.awake_time import AwakeClock
from invrl.interfaces import Buffer
from invrl.rollout.dispatch.dispatcher import Scheduler
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease, Place
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
_POLL_INTERVAL_S = 0.05


class ExternalDispatcher(Scheduler):
    """Offers all work that the buffer admits, within the staleness bound. `timeout_s`
    is the time that an environment has to open the sessions of a lease."""

    def __init__(
        self,
        buffer: Buffer,
        leases: LeaseStore,
        store: RunStore,
        sessions: SessionClient,
        *,
        timeout_s: float,
        awake_time: AwakeClock | None = None,
    ) -> None:
        super().__init__(buffer)
        self._leases = leases
        self._store = store
        self._sessions = sessions
        self._timeout_s = timeout_s
        self._awake_time = awake_time or AwakeClock()
        self._taken_since: dict[Place, float] = {}
        """Time at which each lease without a session was first seen as taken, in lived
        seconds."""
        self._reading = asyncio.Lock()
        """Held while a thread reads the store."""

    async def _schedule(self) -> None:
        while not self._stopping:
            lease = await self._lease()
            if lease is not None:
                await self._offer(lease)
                dropped = self._dropped.get(lease.group_id)
                if dropped is not None:
                    await self._drop(dropped)
                continue
            overdue = self._overdue(await asyncio.to_thread(self._leases.taken))
            for failure in await self._written(self._leases.expire, overdue):
                await self._buffer.record(failure)
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _overdue(self, taken: Sequence[Place]) -> list[Place]:
        """Return taken leases without a session that were seen so for `timeout_s`."""
        now = self._awake_time.now()
        self._taken_since = {
            place: self._taken_since.get(place, now) for place in taken
        }
        return [
            place
            for place, since in self._taken_since.items()
            if now - since > self._timeout_s
        ]

    async def _drop(self, group: DroppedGroup) -> None:
        # In this order: a session that is opened after the look-up needs a lease, and
        # there is none any more.
        await self._written(self._leases.revoke, group.group_id)
        async with self._reading:
            opened = await asyncio.to_thread(self._store.open_sessions, group.group_id)
        aborts = (
            self._sessions.abort(session, FailureReason.GROUP_DROPPED, group.detail)
            for session in opened
        )
        await asyncio.gather(*aborts)

    async def _offer(self, lease: GroupLease) -> None:
        """Offer a lease. If JSON cannot hold the task (a task source may yield
        anything), all members of the lease fail."""
        try:
            await self._written(self._leases.offer, lease)
        except UnsendableTaskError as error:
            for member in lease.members:
                failure = FailedRollout(
                    session_id="",
                    task_id=lease.task.id,
                    group_id=lease.group_id,
                    index=member.index,
                    attempt=member.attempt,
                    reason=FailureReason.EXCEPTION,
                    detail=str(error),
                )
                await self._buffer.record(failure)

    async def _written(
        self,
        write: Callable[Parameters, Answer],
        *args: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Answer:
        """Call a writing method of the leases; wait while the disk is full."""
        folder = self._leases.folder
        return await written_in_thread(folder, "leases of tasks", write, *args, **named)

    async def _end_all(self) -> None:
        await asyncio.to_thread(self._leases.withdraw)
        await self._sessions.close()
