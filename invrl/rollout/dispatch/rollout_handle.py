"""The rollout half as the driver holds it: workers, dispatcher and held-out evaluation
in one object.

It lives in the driver's event loop. `run/processes/cluster.py` runs the training loop
under `guard`, so that a failure of the rollout half ends the run with its own cause.
`cli/commands/evaluate.py` makes one without a buffer."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from invrl.host.output.log_lines import LogSettings
from invrl.interfaces import Buffer
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.auto_concurrency import AutoConcurrency
from invrl.rollout.dispatch.dispatcher import Adapt, Dispatcher, Scheduler
from invrl.rollout.dispatch.evaluation import EvalScore, Evaluation, Watch, evaluate
from invrl.rollout.dispatch.external_environments import ExternalDispatcher
from invrl.rollout.tasks.tasks import load_eval_sets
from invrl.rollout.workers.session_client import DEADLINE_S, SessionClient
from invrl.rollout.workers.worker_actor import WorkerSettings
from invrl.rollout.workers.worker_pool import RayWorker, WorkerPool
from invrl.types.fleet import FleetSnapshot
from invrl.user_code import plugins

T = TypeVar("T")
_STUCK_MARGIN_S = 10.0


class RolloutHandle:
    """Workers, dispatcher and evaluation. `model` is the name that agents send. Without
    a buffer it only runs evaluations. With `external_dispatcher`, environments that we
    do not start run the buffer's leases. `logs` is the folder for the output of the
    workers; None: Ray keeps it. `log` sets what they log; None: user code does.
    `read_fleet` returns the newest load of the engines, for a concurrency that follows
    it. `max_hold_s`: longest time for which the gate holds a turn; None: there is no
    gate. `next_node` returns Ray's id of the node for a new worker; None: that of this
    process."""

    def __init__(
        self,
        config: RolloutConfig,
        *,
        buffer: Buffer | None = None,
        external_dispatcher: ExternalDispatcher | None = None,
        gateway_url: str,
        env_key: str,
        model: str,
        seed: int,
        heartbeat_timeout_s: float = 30.0,
        logs: Path | None = None,
        log: LogSettings | None = None,
        read_fleet: Callable[[], FleetSnapshot] = FleetSnapshot,
        max_hold_s: float | None = None,
        next_node: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config = config
        self._seed = seed
        self._sessions = SessionClient(gateway_url, env_key=env_key)
        self._group_form = config.runs_rollouts and plugins.is_group_form(
            plugins.load_rollout_function(config.rollout_function_path or "")
        )
        settings = WorkerSettings(
            gateway_url=gateway_url,
            model=model,
            rollout=config,
            max_hold_s=max_hold_s,
            python_path=tuple(sys.path),
            log=log,
        )

        def make_worker(name: str) -> RayWorker:
            return RayWorker(
                settings,
                name,
                concurrency=config.most_concurrency,
                heartbeat_timeout_s=heartbeat_timeout_s,
                logs=logs,
                node=next_node(),
            )

        self._pool = WorkerPool(
            make_worker,
            self._sessions,
            size=config.workers.count,
            run_timeout_s=config.rollout_timeout_s + DEADLINE_S + _STUCK_MARGIN_S,
            holds_turns=max_hold_s is not None,
        )
        self._has_workers = external_dispatcher is None or config.eval.tasks is not None
        self._dispatcher: Scheduler | None = external_dispatcher
        if buffer is not None and external_dispatcher is None:
            self._dispatcher = Dispatcher(
                buffer,
                self._sessions,
                self._pool,
                concurrency=config.first_concurrency,
                group_form=self._group_form,
                adapt=_adaptation(config, read_fleet),
            )

    async def start(self) -> None:
        """Wait until the workers have started and loaded the user's code. Raises
        PluginError, ServerError, DeadlineError."""
        if self._has_workers:
            await self._pool.start()

    def dispatch(self) -> None:
        """Start leasing work from the buffer and running it."""
        assert self._dispatcher is not None, "there is no buffer"
        self._dispatcher.start()

    async def stop_dispatching(self) -> None:
        """Stop leasing and abort running work. Evaluations may follow."""
        if self._dispatcher is not None:
            await self._dispatcher.stop()

    async def guard(self, work: Awaitable[T]) -> T:
        """Return `work`'s result, or raise the failure of the rollout half if that
        comes first."""
        if self._dispatcher is None:
            return await work
        return await self._dispatcher.guard(work)

    async def evaluate(
        self,
        step: int,
        ended: Callable[[EvalScore], None] = lambda _: None,
        watch: Watch | None = None,
        planned: Callable[[int], None] = lambda _: None,
    ) -> Evaluation:
        """Runs each mode on the first `eval.tasks` tasks of each set, the same tasks
        each time. `ended` is called with each score as soon as it is known; `watch` is
        informed of each task's rollouts, and `planned` of how many times that will be.
        The step is part of the group ids, and so of the seeds."""
        config = self._config
        scores: dict[str, EvalScore] = {}
        # In a thread, because the task files may be large.
        sets = await asyncio.to_thread(load_eval_sets, config, self._seed)
        modes = list(dict.fromkeys(config.eval.modes))
        planned(len(modes) * sum(len(tasks) for tasks in sets.values()))
        for name, tasks in sets.items():
            for mode in modes:
                label = str(step)
                if name:
                    label = f"{step}/{name}"
                score = await evaluate(
                    tasks,
                    config,
                    set_name=name,
                    mode=mode,
                    sessions=self._sessions,
                    pool=self._pool,
                    group_form=self._group_form,
                    label=label,
                    watch=watch,
                )
                scores[score.name] = score
                ended(score)
        return Evaluation(scores=scores)

    async def stop(self) -> None:
        """Stop dispatching and end the workers. May be called after a failure."""
        await self.stop_dispatching()
        self._pool.stop()
        await self._sessions.close()


def _adaptation(
    config: RolloutConfig, read_fleet: Callable[[], FleetSnapshot]
) -> Adapt | None:
    """Return what adapts the concurrency to the load; None if it is constant."""
    if config.rollout_concurrency != "auto":
        return None
    concurrency = AutoConcurrency(
        config.first_concurrency, most=config.most_concurrency
    )
    return lambda running: concurrency.update(read_fleet(), running=running)
