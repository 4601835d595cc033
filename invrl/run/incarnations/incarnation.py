"""`invrl train`: one incarnation of a run, from its start or a checkpoint to its end.

The driver's process does this; the supervisor above it (`run/processes/supervisor.py`)
starts the next incarnation. The steps themselves are in `run/loop/loop.py`, the
processes in `run/processes/cluster.py`.

Invariants: whatever ends the incarnation (the last step, an error, Ctrl-C), every
process has ended when `run_incarnation` returns. A run folder with checkpoints resumes
from the newest one that is whole (`run/checkpoints/resume.py`)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial

from invrl.algorithms.advantages.advantage_rules import advantage_rules
from invrl.algorithms.advantages.advantages import configured_advantage
from invrl.algorithms.objectives.objectives import ON_ROLLOUTS
from invrl.buffer.failures import FailureReporter
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.buffer.samples.training_samples import build_batch
from invrl.engines.launch.engine_server import count_gpus, smallest_gpu_bytes
from invrl.host.files.disk_waits import (
    until_written,
    write_patiently,
    written_in_thread,
)
from invrl.host.output.incidents import incidents_shown
from invrl.host.output.traces import Traces, open_traces
from invrl.host.processes import interrupts
from invrl.interfaces import AdvantageFn
from invrl.observe.samples.console_samples import sample_rollouts, show_samples
from invrl.observe.screen.progress import open_progress
from invrl.observe.sinks.phase_traces import PhaseTraces
from invrl.observe.sinks.phases import report_span
from invrl.observe.sinks.sinks import RunObserver, open_sinks
from invrl.observe.sinks.token_recorder import TokenRecorder
from invrl.observe.sinks.wait_messages import CurrentPhase, Deadlines, report_waits
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.rollout.tasks.task_labels import guess_notes
from invrl.rollout.tasks.tasks import feedback_notes
from invrl.run.checkpoints.checkpoint import first_checkpoint
from invrl.run.checkpoints.checkpoint_scores import read_scores
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.resume import (
    Start,
    check_store_at,
    find_start,
    start_at_zero,
)
from invrl.run.incarnations.data import load_run_data
from invrl.run.incarnations.on_data import train_on_data
from invrl.run.incarnations.on_saved_batches import train_on_saved_batches
from invrl.run.incarnations.run_parts import RunParts
from invrl.run.loop.evaluation_schedule import EvaluationSchedule
from invrl.run.loop.failed_rollouts import command_for_failures, report_failures
from invrl.run.loop.gpu_turns import GpuTurns
from invrl.run.loop.held_out import HeldOutEvaluations, evaluation_place
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.run.loop.step_traces import StepTraces
from invrl.run.loop.teacher import Teacher, open_teacher
from invrl.run.loop.verification_socket import answer_verifications
from invrl.run.loop.weight_updater import create_weight_updater
from invrl.run.processes.background import in_background
from invrl.run.processes.cluster import Cluster, start_cluster
from invrl.run.processes.environment_program import LOG_NAME
from invrl.run.processes.gpu_fit import fitted_to_gpus
from invrl.run.processes.gpu_plan import plan_run
from invrl.run.processes.phase_progress import (
    PhaseProgress,
    rollouts_text,
)
from invrl.run.processes.process_samples import sample_processes
from invrl.run.processes.served_metrics import ServedMetrics
from invrl.run.processes.tokenizer import keep_tokenizer
from invrl.run.settings.config import Config
from invrl.run.settings.initial_model import without_initial_adapter
from invrl.store.batch_file import batch_path, save_batch
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import abandon_open_sessions
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.weights import WeightVersion

logger = logging.getLogger(__name__)


def run_incarnation(config: Config, folder: RunFolder) -> None:
    """Run from the newest complete checkpoint to the end of the run. The caller holds
    the folder. Raises InvrlError with the cause of a failure; the supervisor then
    starts the next incarnation."""
    config = fitted_to_gpus(config, gpus=count_gpus(), gpu_bytes=smallest_gpu_bytes())
    checkpoints = _open_checkpoints(config, folder)
    if config.run.debug_train_only:
        start = start_at_zero(folder)
    else:
        start = find_start(folder, checkpoints, config.model.folder)
    data = None
    num_steps = config.run.num_steps
    if config.trains_on_data:
        data = load_run_data(config)
        num_steps = data.order.last_step(num_steps)
    phase = CurrentPhase()
    metrics = ServedMetrics(config, folder, "train", num_steps=num_steps)
    traces = open_traces(
        config.run.log.otel_endpoint or "", service="invrl-driver", run=folder.path.name
    )
    sinks = [*open_sinks(folder, config, done=start.step), phase, *metrics.sinks()]
    if traces is not None:
        sinks.append(PhaseTraces(traces))
    rows = read_metrics(folder.metrics_path)
    sinks.append(open_progress(config.run.log.progress, num_steps, rows))
    observer = RunObserver(sinks)
    awaited = PhaseProgress(observer, phase)
    shown = ExitStack()
    shown.enter_context(incidents_shown(observer.note))
    try:  # the display must restore the terminal in any case
        _note_settings(config, folder, start, observer)
        if metrics.message:
            observer.note(metrics.message)
        keep_tokenizer(config, folder)
        if config.run.debug_train_only:
            # Outside the event loop: here an interrupt ends it immediately.
            start = _start_at_given_checkpoint(config)
        if start.checkpoint is not None:
            config = without_initial_adapter(config)
        parts = RunParts(
            config, folder, checkpoints, observer, start, num_steps, awaited
        )
        if config.run.debug_train_only:
            interrupts.run(train_on_saved_batches(parts))
        elif data is not None:
            interrupts.run(train_on_data(parts, data))
        else:
            run = _TrainingRun(
                config,
                folder,
                checkpoints,
                observer,
                start,
                num_steps,
                awaited,
                phase,
                metrics,
                traces,
            )
            interrupts.run(run.run())
    finally:
        shown.close()
        observer.close()
        metrics.close()
        print(f"run folder: {folder.path}", flush=True)


def _open_checkpoints(config: Config, folder: RunFolder) -> Checkpoints:
    return Checkpoints(
        folder.checkpoints_path,
        keep=config.run.checkpoints.keep or 0,
        keep_best=config.run.checkpoints.keep_best or 0,
        read_scores=partial(
            read_scores, folder.metrics_path, config.best_checkpoints_by
        ),
    )


def _start_at_given_checkpoint(config: Config) -> Start:
    """Check the checkpoint that the settings name, if they name one, and start there."""
    checkpoint = first_checkpoint(config.run.load_checkpoint)
    if checkpoint is not None:
        checkpoint.check(config.model.folder)
    return Start(checkpoint=checkpoint)


def _note_settings(
    config: Config, folder: RunFolder, start: Start, observer: RunObserver
) -> None:
    """Show messages on the console before anything starts."""
    observer.note(f"run folder {folder.path}")
    gpus = plan_run(config, count_gpus())
    if gpus is not None:
        observer.note(f"GPUs: {gpus}")
        observer.note(f"micro-batches of {config.train.micro_batch_tokens} tokens")
    if not config.run.debug_rollout_only and config.algorithm.objective in ON_ROLLOUTS:
        for sentence in config.algorithm.without_effect():
            observer.note(f"note: {sentence}")
    for finding in start.findings:
        logger.warning("%s", finding)
        observer.note(finding)
    if not config.trains_alone:
        for sentence in [
            *guess_notes(config.rollout),
            *feedback_notes(config.rollout, config.run.seed),
        ]:
            observer.note(f"note: {sentence}")


@dataclass(frozen=True, slots=True)
class _TrainingRun(RunParts):
    """One incarnation with all parts of a run."""

    phase: CurrentPhase
    metrics: ServedMetrics
    traces: Traces | None

    async def run(self) -> None:
        if self.is_over():
            return
        started_at = time.monotonic()
        await asyncio.to_thread(check_store_at, self.start, self.folder)
        abandon_open_sessions(self.folder.store_path)
        snapshot = self.start.read_snapshot()
        async with (
            self.running(),
            start_cluster(self.config, self.folder, snapshot, self.starting) as cluster,
            AsyncExitStack() as stack,
        ):
            self._make_phase_progress(cluster)
            stack.enter_context(
                self.metrics.of_serving(cluster.serving, cluster.trainer)
            )
            learner = await self._load_learner(cluster, stack)
            await cluster.serving.fleet.admit()
            report_span(self.observer, "starting", 0, began=started_at)
            self.observer.note(
                f"everything is up after {time.monotonic() - started_at:.0f} s"
            )
            self.observer.note(f"router: {cluster.serving.fleet.router.program}")
            self._note_where_rollouts_run(cluster)
            training = first_to_fail(
                self._train(cluster, learner), self.checkpoints.watch()
            )
            try:
                last_step = await cluster.guard(training)
            except (Exception, asyncio.CancelledError) as error:
                if cluster.trainer is not None:
                    await self.save_at_end(
                        cluster.trainer, error, partial(_take_snapshot, cluster.buffer)
                    )
                raise
            await cluster.buffer.close()
        await write_patiently(self.folder.finished_path, str(last_step))

    async def _load_learner(
        self, cluster: Cluster, stack: AsyncExitStack
    ) -> Learner | None:
        """Load the checkpoint into the trainer, and its weights into the fleet, which
        can be verified from then on until the stack is closed. Returns None without a
        trainer."""
        trainer = cluster.trainer
        if trainer is None:
            await cluster.serving.fleet.check_unchanged()
            return None
        updater = create_weight_updater(
            self.config,
            trainer,
            cluster.serving.fleet,
            cluster.serving.gateway.announce_version,
            run_folder=self.folder.path,
        )
        self.awaited.questions["sync"] = updater.phase_text
        self.awaited.questions["starting"] = updater.phase_text
        sync = updater.update
        take_gpu = None
        if self.config.run.colocate:
            turns = GpuTurns(
                trainer,
                cluster.serving.fleet,
                suspend=updater.suspend,
                update=updater.update,
            )
            sync = turns.update
            take_gpu = turns.give_to_trainer
            await take_gpu()
        await self.load_checkpoint(trainer)
        version = WeightVersion(self.start.step)
        await sync(version)
        await stack.enter_async_context(
            answer_verifications(self.folder, updater.verify)
        )
        await cluster.buffer.advance(version)
        saves = self.saves(trainer)
        return Learner(
            trainer=trainer,
            sync=sync,
            take_gpu=take_gpu,
            save=saves.save,
            finish_saves=saves.finish,
            schedule=self.schedule(),
        )

    def _make_phase_progress(self, cluster: Cluster) -> None:
        """Register the queries of the live display about what a phase waits for."""
        group_size = self.config.rollout.n_samples_per_prompt

        async def rollouts() -> str:
            return rollouts_text(await cluster.buffer.waiting(), group_size)

        self.awaited.questions["rollout"] = rollouts
        if cluster.trainer is not None:
            self.awaited.questions["train"] = cluster.trainer.place_text

    def _note_where_rollouts_run(self, cluster: Cluster) -> None:
        if self.config.rollout.environment is not None:
            log = self.folder.log_path(LOG_NAME)
            self.observer.note(f"what your environment prints: {log}")
        elif self.config.rollout.external_environments:
            url = f"{cluster.serving.settings.url}/tasks/lease"
            key = f'$INVRL_ENV_KEY, or "env_key" in {self.folder.path}/private/gateway.json'
            self.observer.note(f"environments lease tasks at {url}; key: {key}")
        else:
            self.observer.note(
                f"what your agent prints: {self.folder.printed_by_agents}"
            )

    async def _train(self, cluster: Cluster, learner: Learner | None) -> int:
        """Evaluate, train, evaluate again. Returns the last step made."""
        waits = report_waits(
            cluster.buffer, self.phase, self.observer, _deadlines(self.config)
        )
        interval_s = self.config.run.metrics.sample_interval_s
        samples = sample_processes(cluster, self.folder, self.observer, interval_s)
        counts = self.metrics.watch_buffer(cluster.buffer, resumed=self.start.step > 0)
        async with in_background(waits), in_background(samples), in_background(counts):
            held_out = None
            accuracy_before = None
            if self.config.rollout.eval.tasks:
                held_out = HeldOutEvaluations(
                    self.config, self.folder, cluster.rollouts, self.observer
                )
                self.awaited.questions["evaluating"] = held_out.tasks.text
                accuracy_before = await held_out.before_training(self.start.step)
            cluster.rollouts.dispatch()
            last_step = await self._run_loop(cluster, learner, held_out)
            cluster.end_external_environments()
            await cluster.rollouts.stop_dispatching()
            if (
                held_out is not None
                and accuracy_before is not None
                and learner is not None
            ):
                accuracy_after = await held_out.evaluate(last_step)
                await held_out.report_gain(accuracy_before, accuracy_after)
        if learner is not None:
            await learner.finish_saves()
        self.show_model(last_step)
        return last_step

    async def _run_loop(
        self,
        cluster: Cluster,
        learner: Learner | None,
        held_out: HeldOutEvaluations | None,
    ) -> int:
        config = self.config
        advantage = configured_advantage(config.algorithm)
        rows = read_metrics(self.folder.metrics_path)
        evaluations = None
        if held_out is not None and config.rollout.eval.interval is not None:
            evaluations = EvaluationSchedule(
                held_out.during_training,
                self.observer,
                interval=config.rollout.eval.interval,
                num_steps=config.run.num_steps,
                place=evaluation_place(config),
            )
            self.checkpoints.step_in_evaluation = evaluations.step_in_evaluation
        teacher = open_teacher(config)
        trace = None
        if self.traces is not None:
            trace = StepTraces(self.traces, self.folder.store_path).add
        parts = Parts(
            buffer=cluster.buffer,
            assemble=partial(self._assemble, advantage),
            until_written=partial(
                until_written, self.folder.path, "what the run saves of its batches"
            ),
            score=None if teacher is None else partial(self._score, teacher),
            observer=self.observer,
            learner=learner,
            evaluations=evaluations,
            show_samples=self._show_samples,
            trace=trace,
            earlier_rows=rows,
            record=TokenRecorder(
                self.folder.trained_tokens_path, done=self.start.step
            ).record,
        )
        reporter = FailureReporter(
            config.buffer.failures.limits(), show_all=command_for_failures(self.folder)
        )
        async with in_background(
            report_failures(cluster.buffer, reporter, self.observer)
        ):
            steps = partial(
                run_loop, parts, done=self.start.step, num_steps=config.run.num_steps
            )
            if evaluations is None:
                return await steps()
            return await evaluations.guard(steps, done=self.start.step, rows=rows)

    def _show_samples(self, step: int, taken: TakenBatch) -> Sequence[str]:
        """Return texts for the console, and send the trackers their rollouts."""
        run = self.config.run
        if run.wandb is not None and run.wandb.rollouts is not None:
            rows = sample_rollouts(
                self.folder.store_path, run.wandb.rollouts, step, taken
            )
            self.observer.rollouts(step, rows)
        return show_samples(self.folder.store_path, run.log.samples, step, taken)

    def _assemble(
        self, advantage: AdvantageFn, step: int, taken: TakenBatch
    ) -> TrainBatch:
        """Read the tokens of a batch and compute its advantages. Runs in a thread, so
        it opens its own connection: the run may end before the thread does."""
        with contextlib.closing(RunStore(self.folder.store_path)) as store:
            rollouts = store.taken_rollouts(taken)
        batch = build_batch(
            taken,
            rollouts,
            advantage,
            self.config.algorithm.advantage_std.eps,
            baseline=self.config.buffer.turn_rewards.baseline,
            use=self.config.buffer.turn_rewards.use,
            extra_columns=self.config.gateway.session.declared_columns.values(),
            rules=advantage_rules(
                self.config.algorithm,
                self.config.rollout.max_new_tokens,
                success_reward=self.config.buffer.success_reward,
            ),
            max_staleness=self.config.buffer.max_staleness,
            masks_stale=self.config.buffer.when_stale == "mask",
        )
        teacher = self.config.algorithm.teacher
        if teacher is None or teacher.url is None:
            self._keep(step, batch)
        return batch

    async def _score(
        self, teacher: Teacher, step: int, batch: TrainBatch
    ) -> TrainBatch:
        """Add the log-probs of a teacher on a server."""
        scored = await teacher.score(batch)
        what = "what the run saves of its batches"
        await written_in_thread(self.folder.path, what, self._keep, step, scored)
        return scored

    def _keep(self, step: int, batch: TrainBatch) -> None:
        """Write the batch into the run folder, if the run saves its batches."""
        if self.config.run.save_rollout_data or self.config.run.debug_rollout_only:
            save_batch(batch_path(self.folder.rollout_data_path, step), batch)


async def _take_snapshot(buffer: BufferHandle, step: int) -> bytes:
    return await buffer.final_snapshot(WeightVersion(step))


def _deadlines(config: Config) -> Deadlines:
    return Deadlines(
        rollout_timeout_s=config.rollout.rollout_timeout_s,
        filtered_out=config.buffer.filtered_out,
        lease_timeout_s=config.gateway.session.lease_timeout_s,
        session_idle_timeout_s=config.gateway.session.idle_timeout_s or 0.0,
        has_gate=config.gateway.gate is not None,
    )
