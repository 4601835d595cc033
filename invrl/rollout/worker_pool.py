"""The rollout workers as one: gives each assignment to the least busy, replaces those that die.

Invariant: when `run` returns, every session of the assignment has ended, whatever became of the worker: those
of a worker that died are aborted WORKER_DIED, those of one that does not answer are aborted TIMEOUT and the
worker is killed (which fails its other assignments as WORKER_DIED). A worker with a thread that cannot be
ended, or over its memory limit, gets no more work and is killed once it is empty. Used by the dispatcher and
the evaluation; makes workers through a factory (`RayWorker`, or the tests' fakes)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, TaskCancelledError

from invrl.errors import DeadlineError, ServerError
from invrl.host.actor_heartbeat import ActorHeartbeat, beat_of, remote_with_beat
from invrl.host.ray_memory import killed_for_memory
from invrl.rollout.session_client import SessionClient
from invrl.rollout.worker_actor import Assignment, RolloutWorker, WorkerReply, WorkerSettings
from invrl.rollout.worker_log import log_name
from invrl.types import FailureReason, Outcome

_log = logging.getLogger(__name__)
_DROP_EVERY_S = 0.1
_DROP_TIMEOUT_S = 10.0
_MAX_DEATHS_IN_A_ROW = 16
"""Without one rollout that ended in between: then it is not a bad rollout but a broken environment."""


class WorkerDied(Exception):
    """The worker's process is gone. Caught by the pool, never leaves it."""


class RayWorker:
    """One worker's process: a Ray actor, for `concurrency` rollouts of training and as many of an evaluation
    beside them. `name` is what messages call it, and its log in the folder `logs`. Once ready, it is killed
    when it has not answered for `heartbeat_timeout_s`. Calls raise WorkerDied, TimeoutError, and what the
    worker raises."""

    def __init__(
        self,
        settings: WorkerSettings,
        name: str,
        *,
        concurrency: int,
        heartbeat_timeout_s: float = 30.0,
        logs: Path | None = None,
    ) -> None:
        self.name = name
        self._log = None if logs is None else logs / log_name(name)
        self._death = ""
        self._heart = ActorHeartbeat(name, lambda: beat_of(self._actor), timeout_s=heartbeat_timeout_s)
        self._watch: asyncio.Task[None] | None = None
        self._actor: Any = (
            remote_with_beat(RolloutWorker)
            # Never a queue in Ray: its wait would count against a rollout's deadline.
            .options(
                num_cpus=0,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=2 * concurrency + 8,
            )
            .remote(replace(settings, log_path=self._log))
        )

    async def ready(self, deadline_s: float) -> None:
        await self._answer(self._actor.ready.remote(), deadline_s)
        if self._watch is None:
            self._watch = asyncio.create_task(self._notice_silence())

    async def _notice_silence(self) -> None:
        """A worker that counts as dead is killed; its calls then end as WorkerDied."""
        try:
            await self._heart.watch()
        except ServerError as error:
            self._death = str(error)
            _log.warning("%s", error)
            ray.kill(self._actor)

    async def run(self, assignment: Assignment, deadline_s: float) -> WorkerReply:
        return await self._answer(self._actor.run.remote(assignment), deadline_s)

    async def drop(self, assignment: Assignment, deadline_s: float) -> bool:
        """Cancels an assignment that runs; False if it does not run, or not yet."""
        return await self._answer(self._actor.drop.remote(assignment.sessions[0].id), deadline_s)

    def kill(self) -> None:
        """Ends the process; calls in it end as WorkerDied."""
        if self._watch is not None:
            self._watch.cancel()
        ray.kill(self._actor)
        if self._log is not None:
            with contextlib.suppress(OSError):
                if not self._log.stat().st_size:
                    self._log.unlink()  # many may die without a word

    async def _answer(self, ref: Any, deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(ref.future())
        except (RayActorError, TaskCancelledError, OutOfMemoryError) as error:
            # Cancelled: user code may cancel every task of its loop.
            killed = killed_for_memory(error, self.name)
            raise WorkerDied(self._death or killed or f"{self.name}: {error}") from None
        except RayTaskError as error:
            raise error.cause from None


@dataclass(slots=True, eq=False)
class _Seat:
    worker: RayWorker
    ready: asyncio.Task[None]
    busy: int = 0
    """Rollouts running in it."""


class WorkerPool:
    """`size` workers made by `make_worker(name)`. `run_timeout_s` bounds one assignment from the outside:
    longer than the worker's own deadlines together, so it strikes only when the worker is stuck."""

    def __init__(
        self,
        make_worker: Callable[[str], RayWorker],
        sessions: SessionClient,
        *,
        size: int,
        run_timeout_s: float,
        start_timeout_s: float = 120.0,
    ) -> None:
        self._make_worker, self._sessions, self._size = make_worker, sessions, size
        self._run_timeout_s, self._start_timeout_s = run_timeout_s, start_timeout_s
        self._seats: list[_Seat] = []
        self._leaving: list[_Seat] = []
        self._made = self._deaths_in_a_row = 0
        self.replaced = 0

    async def start(self) -> None:
        """All workers ready. Raises PluginError, ServerError, DeadlineError."""
        self._seats = [self._new_seat() for _ in range(self._size)]
        await asyncio.gather(*(self._ready(seat) for seat in self._seats))

    async def run(self, assignment: Assignment, dropped: asyncio.Event | None = None) -> tuple[Outcome, ...]:
        """How each session of the assignment ended, in order. Once `dropped` is set it is cancelled. Raises
        ServerError where workers only die, and what the gateway or the worker's own code raises: never
        because of user code."""
        dropped = dropped or asyncio.Event()
        seat = min(self._seats, key=lambda seat: (not seat.ready.done(), seat.busy))
        seat.busy += len(assignment.sessions)
        try:
            await self._ready(seat)
            if dropped.is_set():
                detail = "its group was dropped before it began"
                return await self._abort(assignment, FailureReason.GROUP_DROPPED, detail)
            reply = await self._reply(seat.worker, assignment, dropped)
        except WorkerDied as died:
            if self._replace(seat, str(died)):
                self._count_death(died)
            return await self._abort(assignment, FailureReason.WORKER_DIED, str(died))
        except TimeoutError:
            seat.worker.kill()
            stuck = f"{seat.worker.name} did not answer within {self._run_timeout_s:g} s"
            self._replace(seat, stuck)
            detail = f"{stuck}: its code blocks the worker's event loop or holds the interpreter's lock"
            return await self._abort(assignment, FailureReason.TIMEOUT, detail)
        finally:
            seat.busy -= len(assignment.sessions)
            self._end_if_left(seat)
        if reply.over_memory:
            if self._replace(seat, why := "it is over rollout_worker_memory_gb"):
                self._count_death(f"{seat.worker.name}: {why}")
        else:
            self._deaths_in_a_row = 0
        if reply.stuck_threads:
            self._replace(seat, f"{reply.stuck_threads} threads of ended rollouts go on in it")
        self._end_if_left(seat)
        return reply.outcomes

    async def _reply(self, worker: RayWorker, assignment: Assignment, dropped: asyncio.Event) -> WorkerReply:
        dropping = asyncio.create_task(self._drop(worker, assignment, dropped))
        try:
            return await worker.run(assignment, self._run_timeout_s)
        finally:
            dropping.cancel()

    async def _drop(self, worker: RayWorker, assignment: Assignment, dropped: asyncio.Event) -> None:
        """Once `dropped` is set: tells the worker, until it knows the assignment. What goes wrong here the
        assignment's own call says too."""
        await dropped.wait()
        with contextlib.suppress(WorkerDied, TimeoutError):
            while not await worker.drop(assignment, _DROP_TIMEOUT_S):
                await asyncio.sleep(_DROP_EVERY_S)

    def stop(self) -> None:
        """Ends all workers; what runs in them ends as WORKER_DIED."""
        for seat in [*self._seats, *self._leaving]:
            seat.ready.cancel()
            seat.worker.kill()
        self._seats, self._leaving = [], []

    def _new_seat(self) -> _Seat:
        worker = self._make_worker(f"rollout worker {self._made}")
        self._made += 1
        return _Seat(worker, asyncio.create_task(worker.ready(self._start_timeout_s)))

    async def _ready(self, seat: _Seat) -> None:
        try:
            await asyncio.shield(seat.ready)
        except WorkerDied as died:
            raise ServerError(f"{seat.worker.name} died while it was started: {died}") from None
        except TimeoutError:
            raise DeadlineError(f"{seat.worker.name} to start", self._start_timeout_s) from None

    def _replace(self, seat: _Seat, why: str) -> bool:
        """False if another assignment saw it first."""
        if seat not in self._seats:
            return False
        _log.warning("%s is replaced: %s", seat.worker.name, why)
        self.replaced += 1
        self._seats[self._seats.index(seat)] = self._new_seat()
        self._leaving.append(seat)
        return True

    def _end_if_left(self, seat: _Seat) -> None:
        if seat in self._leaving and not seat.busy:
            self._leaving.remove(seat)
            seat.worker.kill()

    def _count_death(self, died: object) -> None:
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row > _MAX_DEATHS_IN_A_ROW:
            raise ServerError(f"rollout workers die and no rollout ends in between; the last: {died}")

    async def _abort(self, assignment: Assignment, reason: FailureReason, detail: str) -> tuple[Outcome, ...]:
        aborts = (self._sessions.abort(session, reason, detail) for session in assignment.sessions)
        return tuple(await asyncio.gather(*aborts))
