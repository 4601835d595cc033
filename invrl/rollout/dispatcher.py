"""Keeps rollouts running: leases groups from the buffer, opens their sessions, runs them in the pool.

    buffer.lease() ─► open the group's sessions (one call) ─► waiting ─► pool.run ─► slot is free
          ▲  None: look again soon                                            │
          └──────────────── while fewer than `concurrency` run ◄──────────────┘

Invariants: at most `concurrency` rollouts run at a time (a group form larger than that runs alone);
a slot is free as soon as its rollout has ended, not its group; every session that was opened ends.
Outcomes reach the buffer through the gateway's outbox, and through here only where the gateway does not know
the session any more. When the buffer names a group that it has dropped, what waits of it is taken out, its
sessions are aborted, which ends their requests to the engines, and what runs of it is then cancelled. What
goes wrong on our side ends the dispatcher with that exception, which `guard` raises where the loop waits."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from invrl.interfaces import Buffer
from invrl.rollout.session_client import SessionClient, UnreportedRollout
from invrl.rollout.worker_actor import Assignment
from invrl.rollout.worker_pool import WorkerPool
from invrl.types import DroppedGroup, FailedRollout, FailureReason, GroupLease, Session

T = TypeVar("T")
_log = logging.getLogger(__name__)
_POLL_S = 0.04
"""Before the buffer is asked again."""
_ADMISSION_TIMEOUT_S = 600.0
"""A gateway that admits no session for this long is not coming back."""
_END_TIMEOUT_S = 5.0
"""The run is over: a gateway that is gone needs no abort."""


async def first_to_fail(work: Awaitable[T], watch: Awaitable[None]) -> T:
    """`work`'s result; if `watch` ends first, it is by raising, and that is raised."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return await working
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class Scheduler:
    """Something that keeps rollouts coming, in the driver's event loop, until it is stopped or fails."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._stopping = False
        self._scheduler: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._drops: set[asyncio.Task[None]] = set()
        self._dropped: dict[str, DroppedGroup] = {}
        """Named by the buffer since a lease was last asked for: that lease may hold one of them."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told_constrained = False

    def start(self) -> None:
        """Begins to lease, and to cancel what the buffer drops, in the running event loop."""
        self._scheduler = asyncio.create_task(self._guarded(self._schedule()))
        self._follower = asyncio.create_task(self._guarded(self._follow_drops()))

    async def guard(self, work: Awaitable[T]) -> T:
        """`work`'s result; if the scheduler, which `work` may start, fails first, `work` is cancelled and
        that failure raised."""
        return await first_to_fail(work, asyncio.shield(self._failed))

    async def stop(self) -> None:
        """Leases no more, aborts what runs."""
        self._stopping = True
        for task in (self._scheduler, self._follower):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._drops:
            await asyncio.wait(self._drops, timeout=_END_TIMEOUT_S)
        for drop in self._drops:
            drop.cancel()
        await self._end_all()
        if self._failed.done():
            self._failed.exception()  # seen: no warning about it at exit

    async def _schedule(self) -> None:
        raise NotImplementedError

    async def _drop(self, group: DroppedGroup) -> None:
        """Ends what runs of a group that the buffer has dropped."""
        raise NotImplementedError

    async def _end_all(self) -> None:
        """Ends what still runs."""

    async def _lease(self) -> GroupLease | None:
        """Asks the buffer for work. Once the lease has been acted on, `_dropped` says whether the buffer has
        dropped its group meanwhile."""
        self._dropped.clear()
        return await self._buffer.lease()

    async def _follow_drops(self) -> None:
        while not self._stopping:
            for group in await self._buffer.unwanted():
                self._dropped[group.group_id] = group
                # Side by side: a client that does not read its answer holds up the end of its session.
                drop = asyncio.create_task(self._guarded(self._drop(group)))
                self._drops.add(drop)
                drop.add_done_callback(self._drops.discard)

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            if not self._failed.done():
                self._failed.set_exception(error)
            if self._scheduler is not None:
                self._scheduler.cancel()


@dataclass(slots=True, eq=False)
class _Running:
    """An assignment that the pool was given."""

    assignment: Assignment
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: its group was dropped, and the pool cancels it."""


class Dispatcher(Scheduler):
    """`group_form`: a lease is one assignment with all its sessions, not one assignment each."""

    def __init__(
        self, buffer: Buffer, sessions: SessionClient, pool: WorkerPool, *, concurrency: int, group_form: bool
    ) -> None:
        super().__init__(buffer)
        self._sessions = sessions
        self._pool = pool
        self._concurrency = concurrency
        self._group_form = group_form
        self._waiting: deque[Assignment] = deque()
        self._runs: dict[asyncio.Task[None], _Running] = {}
        self._changed = asyncio.Event()

    @property
    def running(self) -> int:
        return sum(len(run.assignment.sessions) for run in self._runs.values())

    async def _drop(self, group: DroppedGroup) -> None:
        waiting = [one for one in self._waiting if one.group_id == group.group_id]
        running = [run for run in self._runs.values() if run.assignment.group_id == group.group_id]
        self._waiting = deque(one for one in self._waiting if one.group_id != group.group_id)
        self._changed.set()
        ended = [*waiting, *(run.assignment for run in running)]
        await self._abort(group, [session for one in ended for session in one.sessions])
        for run in running:
            run.dropped.set()

    async def _abort(self, group: DroppedGroup, sessions: Sequence[Session]) -> None:
        reason, detail = FailureReason.GROUP_DROPPED, group.detail
        await asyncio.gather(*(self._sessions.abort(session, reason, detail) for session in sessions))

    async def _end_all(self) -> None:
        assignments = [*self._waiting, *(run.assignment for run in self._runs.values())]
        left = [session for one in assignments for session in one.sessions]
        self._waiting.clear()
        for run in (runs := list(self._runs)):
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        ended = await asyncio.gather(*(self._end(session) for session in left), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                _log.warning("a session of the ended run stays open: %r", error)

    async def _end(self, session: Session) -> None:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await self._sessions.abort(session, FailureReason.ABORTED, "the run ended")

    async def _schedule(self) -> None:
        # A flag besides the cancellation: a library that is awaited here may lose one.
        while not self._stopping:
            self._changed.clear()
            self._start_what_fits()
            if self._waiting or self.running >= self._concurrency:
                await self._changed.wait()
                continue
            lease = await self._lease()
            if lease is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await self._changed.wait()
                continue
            sessions = await self._sessions.open(lease, deadline_s=_ADMISSION_TIMEOUT_S)
            dropped = self._dropped.get(lease.group_id)
            if dropped is not None:
                await self._abort(dropped, sessions)
                continue
            self._waiting.extend(assignments(lease, sessions, group_form=self._group_form))

    def _start_what_fits(self) -> None:
        while self._waiting:
            busy = self.running
            if busy and busy + len(self._waiting[0].sessions) > self._concurrency:
                return
            assignment = self._waiting.popleft()
            running = _Running(assignment)
            run = asyncio.create_task(self._guarded(self._run(running)))
            self._runs[run] = running
            run.add_done_callback(self._ended)

    async def _run(self, running: _Running) -> None:
        for outcome in await self._pool.run(running.assignment, running.dropped):
            if isinstance(outcome, UnreportedRollout):
                await self._buffer.record(outcome)
            if isinstance(outcome, FailedRollout):
                names = outcome.session_id, outcome.task_id, outcome.reason, outcome.detail
                _log.info("rollout %s of task %s failed (%s): %s", *names)
                self._tell_constrained(outcome)

    def _tell_constrained(self, failure: FailedRollout) -> None:
        """Once, on the console: all rollouts will fail alike, and the run would wait for its deadline."""
        if failure.reason is FailureReason.CONSTRAINED and not self._told_constrained:
            self._told_constrained = True
            print(f"warning: rollout {failure.session_id} trains nothing: {failure.detail}", flush=True)

    def _ended(self, run: asyncio.Task[None]) -> None:
        del self._runs[run]
        self._changed.set()


def assignments(lease: GroupLease, sessions: Sequence[Session], *, group_form: bool) -> list[Assignment]:
    """The calls of the rollout function that a lease asks for. A later lease of a group, for the
    replacements of failed members, gives a group form fewer sessions than the group has."""
    if group_form:
        return [Assignment(task=lease.task, sessions=tuple(sessions))]
    return [Assignment(task=lease.task, sessions=(session,)) for session in sessions]
