"""Hands the buffer's leases to environments that we do not start: the dispatcher's place where nobody is
dispatched. What such an environment leased and did not open in time goes back to the buffer as a failure,
which leases it again. Of a group that the buffer drops, what is leased is no longer, and what was opened is
aborted, which every later call of those sessions is told. Outcomes reach the buffer through the gateway's
outbox."""

import asyncio
import time

from invrl.errors import UnsendableTask
from invrl.interfaces import Buffer
from invrl.rollout.dispatcher import Scheduler
from invrl.rollout.session_client import SessionClient
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.types import DroppedGroup, FailedRollout, FailureReason, GroupLease

_POLL_S = 0.05


class ExternalDispatcher(Scheduler):
    """Offers as much as the buffer admits: nothing is on offer beyond the staleness bound."""

    def __init__(
        self,
        buffer: Buffer,
        leases: LeaseStore,
        store: RunStore,
        sessions: SessionClient,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(buffer)
        self._leases, self._store, self._sessions = leases, store, sessions
        self._timeout_s = timeout_s
        self._reading = asyncio.Lock()
        """One thread at a time reads the store."""

    async def _schedule(self) -> None:
        while not self._stopping:
            lease = await self._lease()
            if lease is not None:
                await self._offer(lease)
                dropped = self._dropped.get(lease.group_id)
                if dropped is not None:
                    await self._drop(dropped)
                continue
            for failure in await asyncio.to_thread(self._leases.expire, time.time() - self._timeout_s):
                await self._buffer.record(failure)
            await asyncio.sleep(_POLL_S)

    async def _drop(self, group: DroppedGroup) -> None:
        # In this order: a session that is not among the open ones finds no lease any more.
        await asyncio.to_thread(self._leases.revoke, group.group_id)
        async with self._reading:
            opened = await asyncio.to_thread(self._store.open_sessions, group.group_id)
        aborts = (
            self._sessions.abort(session, FailureReason.GROUP_DROPPED, group.detail) for session in opened
        )
        await asyncio.gather(*aborts)

    async def _offer(self, lease: GroupLease) -> None:
        """A task that JSON does not carry (a task source may yield anything) is a failure of its members."""
        try:
            await asyncio.to_thread(self._leases.offer, lease)
        except UnsendableTask as error:
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

    async def _end_all(self) -> None:
        await asyncio.to_thread(self._leases.withdraw)
        await self._sessions.close()
