"""The rollout half as the driver holds it: workers, dispatcher and held-out evaluation in one object.

Lives in the driver's event loop; `run/cluster.py` runs the loop under `guard`, so that a failure of
the rollout half ends the run with its own cause. `run/evaluate.py` makes one without a buffer."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from invrl import plugins
from invrl.interfaces import Buffer
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatcher import Dispatcher, Scheduler
from invrl.rollout.evaluation import EvalScore, Evaluation, Watch, evaluate
from invrl.rollout.session_client import DEADLINE_S, SessionClient
from invrl.rollout.tasks import load_eval_sets
from invrl.rollout.worker_actor import WorkerSettings
from invrl.rollout.worker_pool import RayWorker, WorkerPool

T = TypeVar("T")
_STUCK_MARGIN_S = 10.0


class RolloutHandle:
    """`model` is the name agents send. Without a buffer there are evaluations only; with `offers`,
    environments that we do not start run what it leases. `logs`: the folder for what workers print; None: Ray
    has it."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        buffer: Buffer | None = None,
        offers: Scheduler | None = None,
        gateway_url: str,
        env_key: str,
        model: str,
        seed: int,
        heartbeat_timeout_s: float = 30.0,
        logs: Path | None = None,
    ) -> None:
        self._config, self._seed = config, seed
        self._sessions = SessionClient(gateway_url, env_key=env_key)
        self._group_form = config.runs_rollouts and plugins.is_group_form(
            plugins.load_rollout_function(config.rollout_function_path)
        )
        paths = tuple(sys.path)
        settings = WorkerSettings(gateway_url=gateway_url, model=model, rollout=config, python_path=paths)
        self._pool = WorkerPool(
            partial(
                RayWorker,
                settings,
                concurrency=config.rollout_concurrency,
                heartbeat_timeout_s=heartbeat_timeout_s,
                logs=logs,
            ),
            self._sessions,
            size=config.rollout_workers,
            run_timeout_s=config.rollout_timeout_s + DEADLINE_S + _STUCK_MARGIN_S,
        )
        self._dispatcher = offers
        self._workers = offers is None or config.eval_tasks > 0
        if buffer is not None and offers is None:
            room, form = config.rollout_concurrency, self._group_form
            parts = buffer, self._sessions, self._pool
            self._dispatcher = Dispatcher(*parts, concurrency=room, group_form=form)

    async def start(self) -> None:
        """Workers up, user code loaded. Raises PluginError, ServerError, DeadlineError."""
        if self._workers:
            await self._pool.start()

    def dispatch(self) -> None:
        """Begins to run what the buffer leases."""
        assert self._dispatcher is not None, "there is no buffer"
        self._dispatcher.start()

    async def stop_dispatching(self) -> None:
        """Leases no more and aborts what runs; evaluations may follow."""
        if self._dispatcher is not None:
            await self._dispatcher.stop()

    async def guard(self, work: Awaitable[T]) -> T:
        """`work`'s result, or the failure of the rollout half if that comes first."""
        return await (work if self._dispatcher is None else self._dispatcher.guard(work))

    async def evaluate(
        self,
        step: int,
        ended: Callable[[EvalScore], None] = lambda _: None,
        watch: Watch | None = None,
    ) -> Evaluation:
        """Each mode on the first `eval_tasks` tasks of each set, the same ones each time; `ended` is told
        each score as it comes, `watch` each task's rollouts. The step is part of the group ids, hence of
        seeds."""
        config = self._config
        scores: dict[str, EvalScore] = {}
        sets = await asyncio.to_thread(load_eval_sets, config, self._seed)  # files, perhaps large ones
        for name, tasks in sets.items():
            for mode in dict.fromkeys(config.eval_modes):
                score = await evaluate(
                    tasks,
                    config,
                    set_name=name,
                    mode=mode,
                    sessions=self._sessions,
                    pool=self._pool,
                    group_form=self._group_form,
                    label=f"{step}/{name}" if name else str(step),
                    watch=watch,
                )
                scores[score.name] = score
                ended(score)
        return Evaluation(scores=scores)

    async def stop(self) -> None:
        """As `stop_dispatching`, and ends the workers. May be called after a failure."""
        await self.stop_dispatching()
        self._pool.stop()
        await self._sessions.close()
