"""Keeps rollouts running: leases groups from the buffer, opens their sessions, runs
them in the pool.

    buffer.lease() ─► open the group's sessions (one call) ─► waiting ─► pool.run ─► slot is free
          ▲  None: ask again soon                                             │
          └──────────────── while fewer than `concurrency` run ◄──────────────┘

Invariants: no rollout starts while `concurrency` or more run (a group form with more
sessions than that runs alone); a slot is free as soon as its rollout has ended, before
its group has; every opened session ends.

Outcomes reach the buffer through the gateway's outbox. The dispatcher reports an
outcome only if the gateway no longer knows the session.

When the buffer names a group that it has dropped, the dispatcher removes the group's
waiting assignments, aborts its sessions, which ends their requests to the engines, and
then cancels its running assignments.

A failure on our side ends the dispatcher with that exception. `guard` raises it where
the loop waits.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from invrl.interfaces import Buffer
from invrl.rollout.workers.session_client import SessionClient, UnreportedRollout
from invrl.rollout.workers.worker_actor import Assignment
from invrl.rollout.workers.worker_pool import WorkerPool
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.sessions import Session

T = TypeVar("T")
_log = logging.getLogger(__name__)
_POLL_S = 0.04
"""Wait before the buffer is asked again after it had no lease."""
_ADMISSION_TIMEOUT_S = 600.0
"""A gateway that admits no session for this long is considered lost."""
_ADAPT_S = 1.0
"""Pause between two adaptations of the concurrency."""
_END_TIMEOUT_S = 5.0
"""Deadline of each abort at the end of the run. A gateway that has ended needs none."""


Adapt = Callable[[int], int]
"""Takes the number of running rollouts, and returns how many may run."""


async def first_to_fail(work: Awaitable[T], watch: Awaitable[None]) -> T:
    """Return `work`'s result. `watch` never returns: if it raises before `work` is
    done, its exception is raised here."""
    work_task = asyncio.ensure_future(work)
    watch_task = asyncio.ensure_future(watch)
    try:
        await asyncio.wait({work_task, watch_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            watch_task.result()
        return await work_task
    finally:
        work_task.cancel()
        watch_task.cancel()
        await asyncio.gather(work_task, watch_task, return_exceptions=True)


class Scheduler:
    """Leases work from the buffer in the driver's event loop, until it is stopped or
    fails."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._stopping = False
        self._scheduler: asyncio.Task[None] | None = None
        self._follower: asyncio.Task[None] | None = None
        self._drops: set[asyncio.Task[None]] = set()
        self._dropped: dict[str, DroppedGroup] = {}
        """Groups dropped since the latest call of `lease`, by id; its lease may be of
        one of them."""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._warned_constrained = False

    def start(self) -> None:
        """Start two tasks in the running event loop: one leases work, one ends the
        groups that the buffer drops."""
        self._scheduler = asyncio.create_task(self._guarded(self._schedule()))
        self._follower = asyncio.create_task(self._guarded(self._follow_drops()))

    async def guard(self, work: Awaitable[T]) -> T:
        """Return `work`'s result. If the scheduler, which `work` may start, fails
        first, `work` is cancelled and the scheduler's failure is raised."""
        return await first_to_fail(work, asyncio.shield(self._failed))

    async def stop(self) -> None:
        """Stop leasing and abort the running rollouts."""
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
            self._failed.exception()  # marks it as retrieved, so asyncio logs no warning at exit

    async def _schedule(self) -> None:
        raise NotImplementedError

    async def _drop(self, group: DroppedGroup) -> None:
        raise NotImplementedError

    async def _end_all(self) -> None:
        """End the running rollouts."""

    async def _lease(self) -> GroupLease | None:
        """Ask the buffer for work. After the caller has acted on the lease, `_dropped`
        says whether its group was dropped in the meantime."""
        self._dropped.clear()
        return await self._buffer.lease()

    async def _follow_drops(self) -> None:
        while not self._stopping:
            for group in await self._buffer.unwanted():
                self._dropped[group.group_id] = group
                # A task for each group: a client that does not read its answer delays
                # the end of its session.
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
    """An assignment that runs in the pool."""

    assignment: Assignment
    dropped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its group is dropped. The pool then cancels the assignment."""


class Dispatcher(Scheduler):
    """Runs leases in the worker pool. With `group_form` a lease is one assignment with
    all its sessions, otherwise one assignment per session. `concurrency` rollouts run
    at a time; with `adapt`, that is their number at the start."""

    def __init__(
        self,
        buffer: Buffer,
        sessions: SessionClient,
        pool: WorkerPool,
        *,
        concurrency: int,
        group_form: bool,
        adapt: Adapt | None = None,
    ) -> None:
        super().__init__(buffer)
        self._sessions = sessions
        self._pool = pool
        self._concurrency = concurrency
        self._group_form = group_form
        self._adapt = adapt
        self._adapting: asyncio.Task[None] | None = None
        self._waiting: deque[Assignment] = deque()
        self._runs: dict[asyncio.Task[None], _Running] = {}
        self._changed = asyncio.Event()

    def start(self) -> None:
        super().start()
        if self._adapt is not None:
            adapting = self._adapt_forever(self._adapt)
            self._adapting = asyncio.create_task(self._guarded(adapting))

    async def _adapt_forever(self, adapt: Adapt) -> None:
        while not self._stopping:
            await asyncio.sleep(_ADAPT_S)
            self._concurrency = adapt(self.running)
            self._changed.set()

    @property
    def running(self) -> int:
        """Rollouts that run in the pool."""
        return sum(len(run.assignment.sessions) for run in self._runs.values())

    async def _drop(self, group: DroppedGroup) -> None:
        waiting: list[Assignment] = []
        remaining: deque[Assignment] = deque()
        for assignment in self._waiting:
            if assignment.group_id == group.group_id:
                waiting.append(assignment)
            else:
                remaining.append(assignment)
        running = [
            run
            for run in self._runs.values()
            if run.assignment.group_id == group.group_id
        ]
        self._waiting = remaining
        self._changed.set()

        sessions: list[Session] = []
        for assignment in waiting:
            sessions.extend(assignment.sessions)
        for run in running:
            sessions.extend(run.assignment.sessions)
        await self._abort(group, sessions)
        for run in running:
            run.dropped.set()

    async def _abort(self, group: DroppedGroup, sessions: Sequence[Session]) -> None:
        aborts = (
            self._sessions.abort(session, FailureReason.GROUP_DROPPED, group.detail)
            for session in sessions
        )
        await asyncio.gather(*aborts)

    async def _end_all(self) -> None:
        if self._adapting is not None:
            self._adapting.cancel()
        sessions: list[Session] = []
        for assignment in self._waiting:
            sessions.extend(assignment.sessions)
        for run in self._runs.values():
            sessions.extend(run.assignment.sessions)
        self._waiting.clear()

        tasks = list(self._runs)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        aborts = [self._abort_at_end(session) for session in sessions]
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, BaseException):
                _log.warning(
                    "a session stays open although the run has ended: %r", result
                )

    async def _abort_at_end(self, session: Session) -> None:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await self._sessions.abort(session, FailureReason.ABORTED, "the run ended")

    async def _schedule(self) -> None:
        # The flag is checked besides the cancellation: a library that is awaited here
        # may swallow one.
        while not self._stopping:
            self._changed.clear()
            self._start_waiting()
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
            self._waiting.extend(
                assignments(lease, sessions, group_form=self._group_form)
            )

    def _start_waiting(self) -> None:
        """Start the waiting assignments for which slots are free, oldest first."""
        while self._waiting:
            num_running = self.running
            num_next = len(self._waiting[0].sessions)
            if num_running and num_running + num_next > self._concurrency:
                return
            run = _Running(self._waiting.popleft())
            task = asyncio.create_task(self._guarded(self._run(run)))
            self._runs[task] = run
            task.add_done_callback(self._forget_run)

    async def _run(self, run: _Running) -> None:
        for outcome in await self._pool.run(run.assignment, run.dropped):
            if isinstance(outcome, UnreportedRollout):
                await self._buffer.record(outcome)
            if isinstance(outcome, FailedRollout):
                _log.info(
                    "rollout %s of task %s failed (%s): %s",
                    outcome.session_id,
                    outcome.task_id,
                    outcome.reason,
                    outcome.detail,
                )
                self._warn_constrained(outcome)

    def _warn_constrained(self, failure: FailedRollout) -> None:
        """Print the first CONSTRAINED failure: all rollouts fail alike, and the run
        would wait silently for its deadline."""
        if failure.reason is not FailureReason.CONSTRAINED or self._warned_constrained:
            return
        self._warned_constrained = True
        print(
            f"warning: rollout {failure.session_id} trains nothing: {failure.detail}",
            flush=True,
        )

    def _forget_run(self, task: asyncio.Task[None]) -> None:
        del self._runs[task]
        self._changed.set()


def assignments(
    lease: GroupLease, sessions: Sequence[Session], *, group_form: bool
) -> list[Assignment]:
    """Return the calls of the rollout function that a lease needs. A later lease of a
    group replaces failed members only, so a group form may get fewer sessions than the
    group has members."""
    if group_form:
        return [Assignment(task=lease.task, sessions=tuple(sessions))]
    return [Assignment(task=lease.task, sessions=(session,)) for session in sessions]
