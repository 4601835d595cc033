"""What the pool holds of a rollout worker: a Ray actor, its calls with deadlines, its death as an
exception of its own. `cluster.py` hands `RayWorker` to the pool as its way to make workers."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from invrl.errors import DeadlineError
from invrl.rollout.worker_actor import Assignment, RolloutWorker, WorkerReply, WorkerSettings
from invrl.rollout.worker_pool import WorkerDied, WorkerStuck


class RayWorker:
    """Starts the actor, for `concurrency` rollouts of training and as many of an evaluation beside them."""

    def __init__(self, settings: WorkerSettings, name: str, *, concurrency: int) -> None:
        self.name = name
        self._actor: Any = (
            ray.remote(RolloutWorker)
            # Never a queue in Ray: its wait would count against a rollout's deadline.
            .options(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=2 * concurrency + 8)
            .remote(settings)
        )

    async def ready(self, deadline_s: float) -> None:
        """Raises PluginError, WorkerDied, DeadlineError."""
        try:
            await self._answer(self._actor.ready.remote(), deadline_s)
        except TimeoutError:
            raise DeadlineError(f"{self.name} to start", deadline_s) from None

    async def run(self, assignment: Assignment, deadline_s: float) -> WorkerReply:
        """Raises WorkerDied, WorkerStuck, and what the worker raises."""
        try:
            return await self._answer(self._actor.run.remote(assignment), deadline_s)
        except TimeoutError:
            raise WorkerStuck(f"{self.name} did not answer within {deadline_s:g} s") from None

    def kill(self) -> None:
        """Ends the process; calls in it end as WorkerDied."""
        ray.kill(self._actor)

    async def _answer(self, ref: Any, deadline_s: float) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(ref.future()), deadline_s)
        except (RayActorError, TaskCancelledError) as error:  # user code may cancel every task of its loop
            raise WorkerDied(f"{self.name}: {error}") from None
        except RayTaskError as error:
            raise error.cause from None
