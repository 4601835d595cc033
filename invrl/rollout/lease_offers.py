"""Hands the buffer's leases to environments that we do not start: the dispatcher's place where nobody is
dispatched. What such an environment leased and did not open in time goes back to the buffer as a failure,
which leases it again. Outcomes reach the buffer through the gateway's outbox. Made by `cluster.py`."""

import asyncio
import time

from invrl.errors import UnsendableTask
from invrl.interfaces import Buffer
from invrl.lease_store import LeaseStore
from invrl.rollout.dispatcher import Scheduler
from invrl.types import FailedRollout, FailureReason, GroupLease

_POLL_S = 0.05


class LeaseOffers(Scheduler):
    """Offers as much as the buffer admits: nothing is on offer beyond the staleness bound."""

    def __init__(self, buffer: Buffer, leases: LeaseStore, *, timeout_s: float) -> None:
        super().__init__()
        self._buffer, self._leases, self._timeout_s = buffer, leases, timeout_s

    async def _schedule(self) -> None:
        while not self._stopping:
            lease = await self._buffer.lease()
            if lease is not None:
                await self._offer(lease)
                continue
            for failure in await asyncio.to_thread(self._leases.expire, time.time() - self._timeout_s):
                await self._buffer.record(failure)
            await asyncio.sleep(_POLL_S)

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
