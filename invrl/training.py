"""`invrl train`: the parts of a run put together, the loop run on them, and what a run leaves behind.

Called by `cli.py`. Invariant: whatever ends the run (the last step, an error, Ctrl-C), every process has
ended when `run_training` returns, and the report is drawn from the steps there were.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from invrl.algorithms.advantages import advantage_function
from invrl.buffer.batching import build_batch
from invrl.canary import canary_prompts
from invrl.cluster import Cluster, model_folder, start_cluster
from invrl.config import Config
from invrl.errors import InvrlError, WeightSyncError
from invrl.loop import Parts, run_loop
from invrl.metric_sinks import open_sinks
from invrl.progress import RunObserver, open_progress
from invrl.report import write_report
from invrl.rollout.rollout_handle import Evaluation
from invrl.run_folder import RunFolder
from invrl.run_store import RunStore
from invrl.types import TakenBatch, TrainBatch, WeightUpdate, WeightVersion
from invrl.weight_sync import CanaryBound, PhaseDeadlines, WeightTransaction

logger = logging.getLogger(__name__)
_MAX_RESTARTS = 3
"""Of one engine in a run."""


def run_training(config: Config, folder: RunFolder) -> None:
    """One run from start to end. Raises InvrlError with the cause of a run that could not go on."""
    tensorboard = folder.tensorboard_path if config.run.tensorboard else None
    sinks = open_sinks(folder.metrics_path, tensorboard, config)
    observer = RunObserver(sinks, open_progress(config.run.progress, config.run.num_steps))
    observer.note(f"run folder {folder.path}")
    try:
        asyncio.run(_Run(config, folder, observer).run())
    finally:
        observer.close()
        if folder.metrics_path.stat().st_size:
            print(f"reward curve: {write_report(folder.path)}", flush=True)
        print(f"run folder: {folder.path}", flush=True)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run's parts by name; `run` is its life."""

    config: Config
    folder: RunFolder
    observer: RunObserver

    async def run(self) -> None:
        started = time.monotonic()
        self.observer.phase("starting", 0)
        async with start_cluster(self.config, self.folder) as cluster:
            weights = FleetUpdater(self.config, cluster)
            await weights.run(WeightVersion(0))
            await cluster.serving.fleet.admit()
            self.observer.note(f"everything is up after {time.monotonic() - started:.0f} s")
            await cluster.guard(self._train(cluster, weights))

    async def _train(self, cluster: Cluster, weights: FleetUpdater) -> None:
        config = self.config
        evaluates = config.rollout.eval_tasks > 0
        before = await self._evaluate(cluster, 0) if evaluates else None
        cluster.rollouts.dispatch()
        store = RunStore(self.folder.store_path)
        advantage = advantage_function(config.algorithm.advantage)

        def assemble(taken: TakenBatch) -> TrainBatch:
            ids = [rollout.session_id for group in taken.groups for rollout in group.rollouts_G]
            return build_batch(taken, store.rollouts(ids), advantage, config.algorithm.advantage_eps)

        async def evaluate(version: WeightVersion) -> Mapping[str, float]:
            return (await cluster.rollouts.evaluate()).values()

        parts = Parts(
            buffer=cluster.buffer,
            trainer=cluster.trainer,
            weights=weights,
            assemble=assemble,
            observer=self.observer,
            evaluate=evaluate if evaluates else None,
        )
        steps = config.run.num_steps
        try:
            await run_loop(parts, num_steps=steps, eval_interval=config.rollout.eval_interval)
        finally:
            store.close()
        await cluster.rollouts.stop_dispatching()
        if before is not None:
            self._compare(before, await self._evaluate(cluster, steps))
        self.observer.phase("saving", steps)
        checkpoint = self.folder.checkpoints_path / f"step-{steps:06d}"
        await cluster.trainer.save_checkpoint(str(checkpoint / "megatron"))
        await cluster.trainer.export_hugging_face(str(checkpoint / "hugging_face"))
        self.observer.note(f"model: {checkpoint / 'hugging_face'}")

    async def _evaluate(self, cluster: Cluster, step: int) -> Evaluation:
        self.observer.phase("evaluating", step)
        evaluation = await cluster.rollouts.evaluate()
        self.observer.step(step, evaluation.values())
        return evaluation

    def _compare(self, before: Evaluation, after: Evaluation) -> None:
        """Held-out accuracy before and after, on the screen and in report/evaluation.json."""
        rows: dict[str, dict[str, float]] = {}
        for mode, gain in after.gains_since(before).items():
            old, new = getattr(before, mode), getattr(after, mode)
            rows[mode] = {
                "problems": float(new.samples),
                "before": old.accuracy.value,
                "after": new.accuracy.value,
                "gain": gain.value,
                "gain_low": gain.low,
                "gain_high": gain.high,
            }
            self.observer.note(
                f"held-out accuracy, {mode} ({new.samples} problems): "
                f"{old.accuracy.value:.3f} -> {new.accuracy.value:.3f}, "
                f"gain {gain.value:+.3f}, 95 % interval [{gain.low:+.3f}, {gain.high:+.3f}]"
            )
        path = self.folder.report_path / "evaluation.json"
        path.write_text(json.dumps(rows, indent=2) + "\n")


class FleetUpdater:
    """The weight transaction over the fleet as it is now. What an update loses is evicted, and an engine
    that left is given a new process with the committed weights, a few times."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        settings = config.weight_sync
        bound = CanaryBound.for_dtypes(config.engine.engine_dtype, config.train.train_dtype)
        self._trainer = cluster.trainer
        self._fleet = cluster.serving.fleet
        self._restarts: Counter[str] = Counter()
        self._transaction = WeightTransaction(
            cluster.trainer,
            self._fleet.receivers,
            canary_prompts=canary_prompts(model_folder(config)),
            bound=CanaryBound(
                max_gap=settings.canary_max_gap or bound.max_gap,
                mean_gap=settings.canary_mean_gap or bound.mean_gap,
            ),
            deadlines=PhaseDeadlines(load=settings.weight_sync_timeout_s),
        )

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Raises WeightSyncError; engines that it lost get no more traffic."""
        try:
            update = await self._transaction.run(version)
        except WeightSyncError as error:
            for name in error.unrestored:
                await self._fleet.evict(name, str(error))
            raise
        await self._fleet.committed(version)
        for name in update.lost_engines:
            await self._fleet.evict(name, f"lost in the update to version {version}")
        await self._restart_evicted()
        return update

    async def _restart_evicted(self) -> None:
        """A fleet that lost an engine goes on with the others if the engine does not come back."""
        staged = self._transaction.committed
        for name in list(self._fleet.evicted):
            if staged is None or self._restarts[name] >= _MAX_RESTARTS:
                continue
            self._restarts[name] += 1
            logger.warning("restarting %s, which left: %s", name, self._fleet.evicted[name])
            try:
                await self._fleet.restart(name, await self._trainer.layout(), staged)
            except InvrlError:
                logger.exception("%s did not come back (try %d)", name, self._restarts[name])
