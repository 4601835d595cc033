"""One incarnation of `invrl train`: the parts of a run put together, the loop run on them, and what a run
leaves behind. The driver's process does this; the supervisor above it begins the next incarnation.

Invariants: whatever ends the incarnation (the last step, an error, Ctrl-C), every process has ended when
`run_incarnation` returns, and the report is drawn from the steps there were. A run folder with checkpoints
goes on from the newest one that is whole."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from invrl.algorithms.advantages import advantage_function
from invrl.buffer.failures import FailureReport, FailureTeller
from invrl.buffer.training_samples import build_batch
from invrl.errors import DeadlineError, ServerError
from invrl.host import interrupts
from invrl.host.disk import write_atomically
from invrl.observe.console_samples import show_samples
from invrl.observe.progress import open_progress
from invrl.observe.report import has_curve, write_report
from invrl.observe.sinks import RunObserver, open_sinks
from invrl.observe.wait_messages import Activity, Deadlines, tell_silence
from invrl.rollout.dispatcher import first_to_fail
from invrl.rollout.evaluation import EvalScore, Evaluation, failure_note, gain_interval
from invrl.rollout.tasks import label_notes
from invrl.run.checkpoints import Checkpoint, Checkpoints, first_checkpoint
from invrl.run.cluster import Cluster, start_cluster, start_trainer
from invrl.run.config import Config
from invrl.run.failed_rollouts import EvaluationFailures
from invrl.run.loop import Learner, Parts, no_step_note, run_loop, train_values
from invrl.run.resume import beginning_of
from invrl.run.save_schedule import SaveSchedule
from invrl.run.store_check import check_store, check_store_of
from invrl.run.unsaved_weights import save_last_weights
from invrl.run.weight_updater import fleet_updater
from invrl.store.batch_file import batch_path, load_batch, put_lost_aside, save_batch, saved_steps
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import abandon_open_sessions
from invrl.train.train_handle import TrainHandle
from invrl.types import TakenBatch, TrainBatch, WeightVersion

logger = logging.getLogger(__name__)
_FAILURES_EVERY_S = 1.0
_SAVE_AFTER_INTERRUPT_S = 120.0
"""For the batch that the trainer is at, and for the weights after it."""


def run_incarnation(config: Config, folder: RunFolder) -> None:
    """One life of a run: from its newest whole checkpoint to its end. Raises InvrlError with the cause of its
    failure; the supervisor then begins the next one. Whoever calls this holds the folder."""
    checkpoints = Checkpoints(folder.checkpoints_path, keep=config.run.keep_checkpoints)
    findings: list[str] = []
    begin = None if config.run.debug_train_only else checkpoints.newest_whole(findings.append)
    done = begin.step if begin else 0
    findings.append(folder.rewind_metrics(done))
    if not config.run.debug_train_only:
        aside = put_lost_aside(folder.rollout_data_path, after_step=done)
        if aside:
            findings.append(
                f"batches of a lost incarnation are renamed: {', '.join(path.name for path in aside)}"
            )
    display = open_progress(config.run.progress, config.run.num_steps)
    activity = Activity()
    observer = RunObserver([*open_sinks(folder, config, done=done), activity, display])
    observer.note(f"run folder {folder.path}")
    if not config.run.debug_rollout_only:
        for sentence in config.algorithm.without_effect():
            observer.note(f"note: {sentence}")
    for finding in filter(None, findings):
        logger.warning("%s", finding)
        observer.note(finding)
    if not config.run.debug_train_only:
        for sentence in label_notes(config.rollout):
            observer.note(f"note: {sentence}")
    try:
        if config.run.debug_train_only:
            loaded = first_checkpoint(config.run.load_checkpoint)
            if loaded:
                loaded.check()  # outside of an event loop an interrupt ends it at once
            interrupts.run(_train_only(config, folder, checkpoints, observer, loaded))
        else:
            interrupts.run(_Run(config, folder, checkpoints, observer, activity).run(begin))
    finally:
        observer.close()
        if picture := _drawn_report(folder):
            print(f"reward curve: {picture}", flush=True)
        print(f"run folder: {folder.path}", flush=True)


def _drawn_report(folder: RunFolder) -> Path | None:
    """The picture, if there is anything to draw. What goes wrong with it is logged: it says nothing of the
    run."""
    try:
        if has_curve(read_metrics(folder.metrics_path)):
            return write_report(folder.path)
    except Exception:
        logger.exception("the report cannot be drawn")
    return None


async def _train_only(
    config: Config,
    folder: RunFolder,
    checkpoints: Checkpoints,
    observer: RunObserver,
    begin: Checkpoint | None,
) -> None:
    """`--debug-train-only`: one step per saved batch after the checkpoint's, `num_steps` in all at most; then
    a checkpoint. sglang need not be installed. Given the checkpoint of a live run and the batches it trained
    next, losses and weights are that run's, bit for bit in float32."""
    done = begin.step if begin else 0
    data = Path(config.run.load_rollout_data).expanduser().absolute()
    steps = [step for step in saved_steps(data, after_step=done) if step <= config.run.num_steps]
    observer.phase("starting", 0)
    async with start_trainer(config, folder) as trainer:
        if begin:
            await trainer.load_checkpoint(str(begin.megatron))
        try:
            for step in steps:
                observer.phase("train", step)
                result = await trainer.train(load_batch(batch_path(data, step)))
                if note := no_step_note(step, result):
                    observer.note(note)
                observer.step(step, train_values(result))
        except asyncio.CancelledError:
            interrupts.allow_more(_SAVE_AFTER_INTERRUPT_S)
            await save_last_weights(
                trainer, checkpoints, begun_at=done, within_s=_SAVE_AFTER_INTERRUPT_S, note=observer.note
            )
            raise
        end = steps[-1] if steps else done
        observer.phase("checkpoint", end)
        last = await checkpoints.save(trainer, end)
    observer.note(f"model: {last.hugging_face}")


class CountsFailures(Protocol):
    """The part of the buffer that `tell_failures` asks."""

    async def failures(self) -> FailureReport: ...


class ShowsFailures(Protocol):
    """The part of the observer that it tells."""

    def failures(self, failed: Mapping[str, int]) -> None: ...
    def note(self, text: str) -> None: ...


async def tell_failures(
    buffer: CountsFailures,
    teller: FailureTeller,
    observer: ShowsFailures,
    *,
    every_s: float = _FAILURES_EVERY_S,
) -> None:
    """What fails meanwhile, on the screen: counts by reason, and a warning where all fail alike. Returns once
    the buffer has died, of which the loop's own call tells the user."""
    while True:
        try:
            report = await buffer.failures()
        except DeadlineError as error:  # it is busy: the next question may be answered
            logger.warning("the failures of rollouts are not known at the moment: %s", error)
        except ServerError as error:
            return logger.warning("failures of rollouts are not told any more: %s", error)
        else:
            observer.failures(report.failed)
            for text in teller.texts(report):
                observer.note(text)
        await asyncio.sleep(every_s)


@dataclass(frozen=True, slots=True)
class _Run:
    """One life of a run, its parts by name; `run` is that life."""

    config: Config
    folder: RunFolder
    checkpoints: Checkpoints
    observer: RunObserver
    activity: Activity

    async def run(self, begin: Checkpoint | None) -> None:
        """From the checkpoint `begin`, which is whole; None: from the start."""
        beginning = beginning_of(self.folder, begin, num_steps=self.config.run.num_steps)
        self.observer.note(beginning.text)
        if beginning.finished:
            return
        started = time.monotonic()
        self.observer.phase("starting", 0)
        self.folder.finished_path.unlink(missing_ok=True)
        snapshot = begin.buffer.read_bytes() if begin else None
        if begin and snapshot is not None:
            await asyncio.to_thread(check_store_of, self.folder.store_path, begin.path, snapshot)
        elif self.folder.store_path.exists():
            await asyncio.to_thread(check_store, self.folder.store_path)
        abandon_open_sessions(self.folder.store_path)
        async with start_cluster(self.config, self.folder, snapshot) as cluster:
            learner = await self._learner(cluster, begin)
            await cluster.serving.fleet.admit()
            self.observer.note(f"everything is up after {time.monotonic() - started:.0f} s")
            if self.config.rollout.external_environments:
                key = f'$INVRL_ENV_KEY, or "env_key" in {self.folder.path}/private/gateway.json'
                where = f"{cluster.serving.settings.url}/tasks/lease"
                self.observer.note(f"environments lease tasks at {where}; key: {key}")
            else:
                self.observer.note(f"what your agent prints: {self.folder.printed_by_agents}")
            done = begin.step if begin else 0
            try:
                made = await cluster.guard(self._train(cluster, learner, done))
            except (Exception, asyncio.CancelledError) as error:
                if cluster.trainer is not None:
                    interrupted = isinstance(error, asyncio.CancelledError)
                    await self._save_last(cluster.trainer, done, interrupted=interrupted)
                raise
            await cluster.buffer.close()
        write_atomically(self.folder.finished_path, str(made))

    async def _save_last(self, trainer: TrainHandle, done: int, *, interrupted: bool) -> None:
        """`done`: the step that this incarnation began with."""
        within_s = self.config.train.train_step_timeout_s
        if interrupted:
            within_s = min(within_s, _SAVE_AFTER_INTERRUPT_S)
            interrupts.allow_more(within_s)
        saving = save_last_weights(
            trainer, self.checkpoints, begun_at=done, within_s=within_s, note=self.observer.note
        )
        try:
            await first_to_fail(saving, trainer.watch())
        except ServerError as error:  # a rank that does not answer any more
            self.observer.note(f"the newest weights could not be saved: {error}")

    async def _learner(self, cluster: Cluster, begin: Checkpoint | None) -> Learner | None:
        """The trainer, at the checkpoint's step, and the fleet with its weights."""
        trainer = cluster.trainer
        if trainer is None:
            return None
        if begin:
            await trainer.load_checkpoint(str(begin.megatron))
        sync = fleet_updater(self.config, trainer, cluster.serving.fleet).run
        version = WeightVersion(begin.step if begin else 0)
        await sync(version)
        await cluster.buffer.advance(version)

        run = self.config.run
        return Learner(
            trainer=trainer,
            sync=sync,
            save=partial(self.checkpoints.save, trainer),
            schedule=SaveSchedule(steps=run.save_interval, seconds=run.save_interval_s),
        )

    async def _train(self, cluster: Cluster, learner: Learner | None, done: int) -> int:
        """The last step made."""
        telling = asyncio.create_task(
            tell_silence(cluster.buffer, self.activity, self.observer, _deadlines(self.config))
        )
        try:
            return await self._train_and_evaluate(cluster, learner, done)
        finally:
            telling.cancel()
            await asyncio.wait({telling})

    async def _train_and_evaluate(self, cluster: Cluster, learner: Learner | None, done: int) -> int:
        config = self.config
        evaluates = config.rollout.eval_tasks > 0
        watch = EvaluationFailures(
            at_start=config.buffer.max_failures_at_start,
            rules=config.buffer.failure_rules(),
            tell=self.observer.note,
        )
        before = await self._before(cluster, watch, done) if evaluates else None
        cluster.rollouts.dispatch()
        advantage = advantage_function(config.algorithm.advantage, config.algorithm.reward_deviation)

        def assemble(step: int, taken: TakenBatch) -> TrainBatch:
            # In a thread, so with a connection of its own: the run may end before the thread does.
            with contextlib.closing(RunStore(self.folder.store_path)) as store:
                rollouts = store.taken_rollouts(taken)
            batch = build_batch(
                taken,
                rollouts,
                advantage,
                config.algorithm.advantage_eps,
                baseline=config.buffer.turn_reward_baseline,
                use=config.buffer.turn_reward_use,
            )
            if config.run.save_rollout_data or config.run.debug_rollout_only:
                save_batch(batch_path(self.folder.rollout_data_path, step), batch)
            return batch

        async def evaluate(version: WeightVersion) -> Mapping[str, float]:
            evaluation = await cluster.rollouts.evaluate(version, watch=watch)
            self._tell_failed(evaluation)
            return await asyncio.to_thread(evaluation.values)  # its intervals are resampled

        parts = Parts(
            buffer=cluster.buffer,
            assemble=assemble,
            observer=self.observer,
            learner=learner,
            evaluate=evaluate if evaluates else None,
            show_samples=partial(show_samples, self.folder.store_path, config.run.log_samples),
        )
        steps = config.run.num_steps
        teller = FailureTeller(config.buffer.failure_limits())
        telling = asyncio.create_task(tell_failures(cluster.buffer, teller, self.observer))
        try:
            made = await run_loop(
                parts, done=done, num_steps=steps, eval_interval=config.rollout.eval_interval
            )
        finally:
            telling.cancel()
            await asyncio.wait({telling})
        cluster.end_external_environments()
        await cluster.rollouts.stop_dispatching()
        if before is not None and learner is not None:
            after = await self._evaluate(cluster, watch, made)
            await asyncio.to_thread(self._compare, before, after)
        if last := self.checkpoints.latest():
            self.observer.note(f"model: {last.hugging_face}")
        return made

    async def _before(self, cluster: Cluster, watch: EvaluationFailures, done: int) -> Evaluation | None:
        """The evaluation before the first step, made once in a run; None where it is lost."""
        path = self.folder.report_path / "evaluation-before.json"
        try:
            if path.exists():
                return msgspec.json.decode(path.read_bytes(), type=Evaluation)
        except msgspec.MsgspecError as error:
            self.observer.note(f"{path} is damaged ({error}): nothing to compare the end with")
            return None
        if done:
            self.observer.note(f"{path} is missing: nothing to compare the end with")
            return None
        evaluation = await self._evaluate(cluster, watch, 0)
        write_atomically(path, msgspec.json.encode(evaluation).decode())
        return evaluation

    async def _evaluate(self, cluster: Cluster, watch: EvaluationFailures, step: int) -> Evaluation:
        self.observer.phase("evaluating", step)
        evaluation = await cluster.rollouts.evaluate(step, watch=watch)
        self._tell_failed(evaluation)
        self.observer.step(step, await asyncio.to_thread(evaluation.values))
        return evaluation

    def _tell_failed(self, evaluation: Evaluation) -> None:
        for score in evaluation.scores.values():
            if score.failures:
                self.observer.note(f"held-out tasks, {failure_note(score)}")

    def _compare(self, before: Evaluation, after: Evaluation) -> None:
        for mode, score in after.scores.items():
            gain = gain_interval(before.scores[mode], score)
            old, new = (one.scores[mode].accuracy.value for one in (before, after))
            self.observer.note(
                f"held-out accuracy, {mode} ({_size_of(score)}): {old:.3f} -> {new:.3f}, "
                f"gain {gain.value:+.3f}, 95 % interval [{gain.low:+.3f}, {gain.high:+.3f}]"
                f"{_failed_of(before.scores[mode], 'before')}{_failed_of(score, 'after')}"
            )


def _size_of(score: EvalScore) -> str:
    """Of what an accuracy is the mean: each task may have been tried several times."""
    tasks = f"{len(score.task_ids):,} tasks"
    return tasks if score.samples == len(score.task_ids) else f"{tasks}, {score.samples:,} samples"


def _deadlines(config: Config) -> Deadlines:
    return Deadlines(
        rollout_timeout_s=config.rollout.rollout_timeout_s,
        filtered_out=config.buffer.filtered_out,
        lease_timeout_s=config.gateway.lease_timeout_s,
        session_idle_timeout_s=config.gateway.session_idle_timeout_s,
    )


def _failed_of(score: EvalScore, when: str) -> str:
    failed = sum(score.failures.values())
    return f"; {failed} of {score.samples} rollouts failed {when}" if failed else ""
