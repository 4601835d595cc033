"""The rollout workers: gives each assignment to the least busy one, and replaces those
that die.

Invariant: when `WorkerPool.run` returns, every session of the assignment has ended,
whatever happened to the worker. Sessions of a worker that died are aborted as
WORKER_DIED. If a worker does not answer, its sessions are aborted as TIMEOUT and it is
killed, so that its other assignments fail as WORKER_DIED. A worker with a thread that
cannot be ended, or over its memory limit, gets no more assignments and is killed once
it runs none. The pool makes workers through a factory: `RayWorker`, or a fake in tests.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from invrl.errors import ActorDiedError, ActorSilentError, DeadlineError, ServerError
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.rollout.workers.held_time import longest_held, never_held, wait_unheld
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import (
    Assignment,
    RolloutWorker,
    WorkerReply,
    WorkerSettings,
)
from invrl.rollout.workers.worker_log import log_name
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import Outcome

Reply = TypeVar("Reply")
_log = logging.getLogger(__name__)
_DROP_INTERVAL_S = 0.1
_DROP_TIMEOUT_S = 10.0
_MAX_DEATHS_IN_A_ROW = 16
"""Workers that may die in a row without a finished rollout in between. Beyond this the
cause is not a bad rollout but a broken environment."""


class RayWorker:
    """One worker's process: a Ray actor for `concurrency` training rollouts, and as
    many of an evaluation at the same time. `name` is used in messages; its log in the
    folder `logs` is named after it. Once ready, the worker is killed if it does not
    answer for `heartbeat_timeout_s`. Calls raise ActorDiedError, ActorSilentError, and
    what the worker raises."""

    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        *,
        concurrency: int,
        heartbeat_timeout_s: float = 30.0,
        logs: Path | None = None,
        node: str | None = None,
    ) -> None:
        """`node`: Ray's id of the worker's node; None: that of this process."""
        self.name = name
        self._log: Path | None = None
        if logs is not None:
            self._log = logs / log_name(name)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._watch: asyncio.Task[None] | None = None
        self._cause_of_death = ""
        # Calls must never wait in Ray's queue: that time would count against a
        # rollout's deadline.
        options = ActorOptions(max_concurrency=2 * concurrency + 8, node=node)
        settings = replace(
            settings,
            process=name.replace(" ", "-"),
            log_path=self._log,
            own_temporary_folder=True,
        )
        self._actor = start_actor(name, RolloutWorker, options, settings)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the worker has loaded the user's functions."""
        await self._reply(self._actor.call(RolloutWorker.ready, deadline_s))
        if self._watch is None:
            self._watch = asyncio.create_task(self._kill_when_silent())

    async def run(self, assignment: Assignment) -> WorkerReply:
        """Run an assignment. The pool has a deadline for it, which depends on the time
        for which the gate holds its turns."""
        return await self._reply(
            self._actor.call(RolloutWorker.run, math.inf, assignment)
        )

    async def drop(self, assignment: Assignment, deadline_s: float) -> bool:
        """Cancel a running assignment. Returns False if it does not run, or not yet."""
        first_session = assignment.sessions[0].id
        return await self._reply(
            self._actor.call(RolloutWorker.drop, deadline_s, first_session)
        )

    def kill(self) -> None:
        """End the process. Its log is removed if nothing was printed: many workers may
        die silently."""
        if self._watch is not None:
            self._watch.cancel()
        self._actor.kill()
        if self._log is not None:
            with contextlib.suppress(OSError):
                if self._log.stat().st_size == 0:
                    self._log.unlink()

    async def _kill_when_silent(self) -> None:
        try:
            await self._actor.watch(self._heartbeat_timeout_s)
        except ServerError as error:
            self._cause_of_death = str(error)
            _log.warning("%s", error)
            self._actor.kill()

    async def _reply(self, call: Awaitable[Reply]) -> Reply:
        """Await the reply to a call. If the worker was killed because it was silent,
        ActorDiedError says that."""
        try:
            return await call
        except ActorDiedError:
            if self._cause_of_death:
                raise ActorDiedError(self._cause_of_death) from None
            raise


@dataclass(slots=True, eq=False)
class _PooledWorker:
    worker: RayWorker
    start: asyncio.Task[None]
    num_running: int = 0


class WorkerPool:
    """`size` workers made by `make_worker(name)`. `run_timeout_s` bounds one assignment
    from the outside: it is longer than the worker's own deadlines together, so it
    passes only if the worker is stuck. `holds_turns`: whether the gateway has a gate,
    whose time neither counts."""

    def __init__(
        self,
        make_worker: Callable[[str], RayWorker],
        sessions: SessionClient,
        *,
        size: int,
        run_timeout_s: float,
        start_timeout_s: float = 120.0,
        holds_turns: bool = False,
    ) -> None:
        self._make_worker = make_worker
        self._sessions = sessions
        self._size = size
        self._run_timeout_s = run_timeout_s
        self._start_timeout_s = start_timeout_s
        self._holds_turns = holds_turns
        self._workers: list[_PooledWorker] = []
        self._leaving: list[_PooledWorker] = []
        """Replaced workers that still run rollouts."""
        self._num_made = 0
        self._deaths_in_a_row = 0
        self.replaced = 0
        """Number of workers replaced since the start."""

    async def start(self) -> None:
        """Start all workers and wait for them. Raises PluginError, ServerError,
        DeadlineError."""
        self._workers = [self._new_worker() for _ in range(self._size)]
        await asyncio.gather(*(self._wait_started(pooled) for pooled in self._workers))

    async def run(
        self, assignment: Assignment, dropped: asyncio.Event | None = None
    ) -> tuple[Outcome, ...]:
        """Run an assignment and return how each of its sessions ended, in order. It is
        cancelled once `dropped` is set. Raises ServerError if workers die again and
        again, and what the gateway or the worker's own code raises; never an error of
        user code."""
        if dropped is None:
            dropped = asyncio.Event()
        pooled = min(
            self._workers,
            key=lambda candidate: (not candidate.start.done(), candidate.num_running),
        )
        worker = pooled.worker
        pooled.num_running += len(assignment.sessions)
        try:
            await self._wait_started(pooled)
            if dropped.is_set():
                detail = "its group was dropped before it began"
                return await self._abort(
                    assignment, FailureReason.GROUP_DROPPED, detail
                )
            reply = await self._run_in(worker, assignment, dropped)
        except ActorDiedError as death:
            if self._replace(pooled, str(death)):
                self._count_death(str(death))
            return await self._abort(assignment, FailureReason.WORKER_DIED, str(death))
        except ActorSilentError:
            worker.kill()
            reason = f"{worker.name} did not answer within {self._run_timeout_s:g} s"
            self._replace(pooled, reason)
            detail = (
                f"{reason}: its code blocks the worker's event loop or holds the interpreter's lock, as a "
                "synchronous client or a long computation in an async function does; write it with def"
            )
            return await self._abort(assignment, FailureReason.TIMEOUT, detail)
        finally:
            pooled.num_running -= len(assignment.sessions)
            self._kill_if_done(pooled)
        self._consider_replacing(pooled, reply)
        return reply.outcomes

    def stop(self) -> None:
        """Kill all workers; what runs in them ends as WORKER_DIED."""
        for pooled in [*self._workers, *self._leaving]:
            pooled.start.cancel()
            pooled.worker.kill()
        self._workers = []
        self._leaving = []

    async def _run_in(
        self, worker: RayWorker, assignment: Assignment, dropped: asyncio.Event
    ) -> WorkerReply:
        held_s = never_held
        if self._holds_turns:
            held_s = longest_held(self._sessions, assignment.sessions)
        dropping = asyncio.create_task(self._drop_when_set(worker, assignment, dropped))
        run = asyncio.create_task(worker.run(assignment))
        try:
            await wait_unheld({run}, self._run_timeout_s, held_s)
            if not run.done():
                raise ActorSilentError(
                    f"{worker.name} to answer run()", self._run_timeout_s
                )
            return run.result()
        finally:
            run.cancel()
            dropping.cancel()

    async def _drop_when_set(
        self, worker: RayWorker, assignment: Assignment, dropped: asyncio.Event
    ) -> None:
        """Ask the worker, once `dropped` is set, to drop the assignment until the
        worker knows of it. If the worker fails here, the call that runs the assignment
        reports it."""
        await dropped.wait()
        with contextlib.suppress(ActorDiedError, ActorSilentError):
            while not await worker.drop(assignment, _DROP_TIMEOUT_S):
                await asyncio.sleep(_DROP_INTERVAL_S)

    def _new_worker(self) -> _PooledWorker:
        worker = self._make_worker(f"rollout worker {self._num_made}")
        self._num_made += 1
        return _PooledWorker(
            worker, asyncio.create_task(worker.ready(self._start_timeout_s))
        )

    async def _wait_started(self, pooled: _PooledWorker) -> None:
        name = pooled.worker.name
        try:
            await asyncio.shield(pooled.start)
        except ActorDiedError as death:
            raise ServerError(f"{name} died while it was started: {death}") from None
        except ActorSilentError:
            raise DeadlineError(f"{name} to start", self._start_timeout_s) from None

    def _consider_replacing(self, pooled: _PooledWorker, reply: WorkerReply) -> None:
        """Replace a worker that asks to be replaced."""
        if reply.over_memory:
            reason = "it is over workers.memory_gb"
            if self._replace(pooled, reason):
                self._count_death(f"{pooled.worker.name}: {reason}")
        else:
            self._deaths_in_a_row = 0
        if reply.stuck_threads:
            self._replace(
                pooled,
                f"{reply.stuck_threads} threads of ended rollouts still run in it",
            )
        self._kill_if_done(pooled)

    def _replace(self, pooled: _PooledWorker, reason: str) -> bool:
        """Put a new worker in its place. Returns False if another assignment has
        already done so."""
        if pooled not in self._workers:
            return False
        _log.warning("%s is replaced: %s", pooled.worker.name, reason)
        self.replaced += 1
        self._workers[self._workers.index(pooled)] = self._new_worker()
        self._leaving.append(pooled)
        return True

    def _kill_if_done(self, pooled: _PooledWorker) -> None:
        """Kill a replaced worker once it runs nothing."""
        if pooled in self._leaving and pooled.num_running == 0:
            self._leaving.remove(pooled)
            pooled.worker.kill()

    def _count_death(self, cause: str) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _MAX_DEATHS_IN_A_ROW:
            raise ServerError(
                f"{self._deaths_in_a_row} rollout workers died in a row, and no rollout ended in between; "
                f"the last death: {cause}"
            )

    async def _abort(
        self, assignment: Assignment, reason: FailureReason, detail: str
    ) -> tuple[Outcome, ...]:
        aborts = (
            self._sessions.abort(session, reason, detail)
            for session in assignment.sessions
        )
        return tuple(await asyncio.gather(*aborts))
