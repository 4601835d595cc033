"""What a rollout dispatcher is tested with: leases, sessions and workers that a test
holds."""

from __future__ import annotations

import asyncio
import time

from invrl.rollout.dispatch.dispatcher import Dispatcher
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task


class Leases:
    """A buffer that leases `groups` groups of `size`, as fast as it is asked."""

    def __init__(self, groups, size=4):
        self.left = [
            GroupLease(
                group_id=f"g{g}",
                task=Task(id=f"t{g}", payload={}),
                members=tuple(GroupMember(index=i, attempt=0) for i in range(size)),
            )
            for g in range(groups)
        ]
        self.asked = 0
        self.dropped = asyncio.Queue()

    async def lease(self):
        self.asked += 1
        return self.left.pop(0) if self.left else None

    async def unwanted(self):
        return (await self.dropped.get(),)


class Opener:
    def __init__(self, error=None):
        self.error = error
        self.opened = []
        self.aborted = {}

    async def open(self, lease, *, purpose="train", sampling=None, deadline_s=None):
        if self.error:
            raise self.error
        sessions = [
            Session(
                id=f"{lease.group_id}/{member.index}",
                key="k",
                base_url="http://gw/s/k/v1",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=member.index,
                attempt=member.attempt,
                purpose=purpose,
                sampling=sampling or Sampling(),
            )
            for member in lease.members
        ]
        self.opened.extend(sessions)
        return sessions

    async def abort(self, session, reason, detail):
        self.aborted[session.id] = reason


class HeldPool:
    """Rollouts run until they are released, by session id."""

    def __init__(self, error=None):
        self.error = error
        self.running = {}
        self.calls = []
        self.most = 0

    async def run(self, assignment, dropped=None):
        if self.error:
            raise self.error
        ids = tuple(s.id for s in assignment.sessions)
        self.calls.append(ids)
        self.running[ids] = asyncio.Event()
        self.most = max(self.most, sum(len(each) for each in self.running))
        try:
            await self.running[ids].wait()
        finally:
            del self.running[ids]
        return ()

    def release(self, *ids):
        self.running[ids].set()


async def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.002)


def started_dispatcher(buffer, opener, pool, concurrency, group_form=False, adapt=None):
    dispatcher = Dispatcher(
        buffer,
        opener,
        pool,
        concurrency=concurrency,
        group_form=group_form,
        adapt=adapt,
    )
    dispatcher.start()
    return dispatcher
