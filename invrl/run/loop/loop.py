"""The loop, over interfaces only: take a batch -> train -> send weights -> next.

Rollouts continue meanwhile, up to the buffer's staleness bound: bound 0 makes this the
synchronous loop, 1 one-step-off-policy, k fully asynchronous. The code is the same for
all. Invariant: the buffer learns of a version only after every engine has committed it
and its canary has passed; from then on it admits work for it and counts its tokens.

Step n makes version n, even if the batch had no signal and no weight changed
(`StepResult.optimizer_steps` is 0): versions count batches, so staleness and the ledger
need no second clock. The engines are then sent the same weights again, in the usual
transaction.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from invrl.errors import FilteredOutError
from invrl.interfaces import Buffer, StepResult, TokenRecord, Trainer
from invrl.observe.metrics.collapse import COLLAPSE_METRICS, Row, collapse
from invrl.observe.metrics.step_metrics import (
    CHECKPOINT_PHASE,
    reply_metrics,
    rollout_metrics,
    shaping_metrics,
    time_metrics,
    token_age_metrics,
    update_metrics,
)
from invrl.observe.metrics.trained_and_asked import trained_and_asked
from invrl.observe.sinks.phases import observed_phase
from invrl.observe.sinks.sinks import Sink
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.loop.evaluation_schedule import EvaluationSchedule
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.metrics import Metrics, resolve, timed
from invrl.types.weights import WeightUpdate, WeightVersion

Assemble = Callable[[int, TakenBatch], TrainBatch]
"""Reads the tokens of a step's batch from the run's store and computes advantages. Runs
in a thread, so that gateway and fleet are watched and rollouts dispatched meanwhile."""
Score = Callable[[int, TrainBatch], Awaitable[TrainBatch]]
"""Adds another server's scores to a step's samples."""
UntilWritten = Callable[[Callable[[], Awaitable[TrainBatch]]], Awaitable[TrainBatch]]
ShowSamples = Callable[[int, TakenBatch], Sequence[str]]
"""Returns texts for the console from a step's rollouts; runs in a thread too."""
Sync = Callable[[WeightVersion], Awaitable[WeightUpdate]]
"""Gives the trainer's weights to the fleet as this version, in one transaction."""
TakeGpu = Callable[[], Awaitable[None]]
"""Gives the GPU to the trainer. `Sync` gives it back to the engines."""
Save = Callable[[int, bytes], Awaitable[object]]
"""Writes the checkpoint of a step: the trainer as it is, and this snapshot of the
buffer."""
Record = Callable[[int, TrainBatch, Sequence[TokenRecord | None]], str]
"""Keeps a step's token records; returns a warning for the console, or "". Runs in a
thread."""
Trace = Callable[[int, TrainBatch, Mapping[str, tuple[float, float]]], None]
"""Adds a step to the traces of its turns, with the start and end of each phase in Unix
seconds. Runs in a thread."""


async def _at_once() -> None:
    """Return immediately."""


async def _once(work: Callable[[], Awaitable[TrainBatch]]) -> TrainBatch:
    return await work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """Makes new versions. `save` runs when the schedule says so, and after the last
    step."""

    trainer: Trainer
    sync: Sync
    save: Save
    finish_saves: Callable[[], Awaitable[None]] = _at_once
    """Waits until the newest checkpoint is complete."""
    take_gpu: TakeGpu | None = None
    """None if the trainer does not share its GPUs."""
    schedule: SaveSchedule = field(default_factory=SaveSchedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Components of the loop. Without a learner the version never changes, and batches
    are only kept."""

    buffer: Buffer
    assemble: Assemble
    observer: Sink
    learner: Learner | None
    until_written: UntilWritten = _once
    """Does work that writes to the disk, and repeats it while the disk is full."""
    score: Score | None = None
    evaluations: EvaluationSchedule | None = None
    show_samples: ShowSamples | None = None
    record: Record | None = None
    trace: Trace | None = None
    earlier_rows: Sequence[Row] = ()
    """Metrics of the steps before a resume: the policy may have collapsed in them."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """Phases of one step: announces each to the observer, and measures its seconds."""

    observer: Sink
    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Start and end of each phase, in Unix seconds."""

    @contextmanager
    def within(self, name: str) -> Iterator[dict[str, float]]:
        """Measure a phase. The block may fill in the seconds of the phase's parts."""
        with (
            observed_phase(self.observer, name, self.step) as parts,
            timed(self.seconds, name),
        ):
            began = time.time()
            yield parts
        self.times[name] = (began, began + self.seconds[name])


@dataclass(slots=True)
class _Alarms:
    """Notes on the console when the policy collapses, and when what is trained parts
    from what was asked for: each once, when it begins."""

    observer: Sink
    rows: list[Row]
    """Metrics of all steps so far."""
    has_collapsed: bool = False
    _has_parted: bool = False

    def after_step(self, step: int, values: Mapping[str, float]) -> None:
        judged = {name: values[name] for name in COLLAPSE_METRICS if name in values}
        self.rows.append({"step": step, **judged})
        collapsed = collapse(self.rows)
        if collapsed and not self.has_collapsed:
            self.observer.note(f"step {step}: {collapsed}")
        self.has_collapsed = self.has_collapsed or bool(collapsed)
        parted = trained_and_asked(values)
        if parted and not self._has_parted:
            self.observer.note(f"step {step}: {parted}")
        self._has_parted = bool(parted)


async def run_loop(parts: Parts, *, done: int, num_steps: int) -> int:
    """Make steps `done` + 1 to `num_steps`; with a learner, step n makes version n.
    Returns the last step made. That is an earlier one if the group filter leaves
    nothing to train on: the loop then reports this, and saves the model of that
    step."""
    if parts.learner is not None:
        parts.learner.schedule.begin()
    saved_step = done
    alarms = _Alarms(parts.observer, list(parts.earlier_rows))
    for step in range(done + 1, num_steps + 1):
        phases = _Phases(parts.observer, step)
        try:
            with phases.within("rollout"):
                taken = await parts.buffer.take()
        except FilteredOutError as reason:
            parts.observer.note(_early_end_note(step - 1, num_steps, reason))
            if parts.learner is not None and step - 1 > saved_step:
                await _save_early(parts.buffer, parts.learner, phases, step - 1)
            return step - 1

        batch = await _make_batch(parts, phases, taken)
        values = _batch_values(taken, batch)

        if parts.learner is None:
            await parts.buffer.advance(taken.version)
        else:
            values |= await _learn(
                parts,
                parts.learner,
                taken,
                batch,
                phases,
                last=step == num_steps,
                is_told=alarms.has_collapsed,
            )
            if CHECKPOINT_PHASE in phases.seconds:
                saved_step = step

        values |= resolve(await parts.buffer.metrics(), "buffer/")
        values |= resolve(
            time_metrics(phases.seconds, taken, batch.trained.tokens), "time/"
        )
        parts.observer.step(step, values)
        alarms.after_step(step, values)
        if parts.show_samples is not None:
            for text in await asyncio.to_thread(parts.show_samples, step, taken):
                parts.observer.note(text)
        if parts.evaluations is not None:
            await parts.evaluations.after_step(step)
    return max(done, num_steps)


async def _make_batch(parts: Parts, phases: _Phases, taken: TakenBatch) -> TrainBatch:
    """Assemble the batch, and let the teacher score it if there is one."""
    step = phases.step
    with phases.within("assemble"):
        batch = await parts.until_written(
            lambda: asyncio.to_thread(parts.assemble, step, taken)
        )
    if parts.score is not None:
        with phases.within("teacher"):
            batch = await parts.score(step, batch)
    return batch


def _batch_values(taken: TakenBatch, batch: TrainBatch) -> dict[str, float]:
    metrics = {
        **rollout_metrics(taken),
        **reply_metrics(batch),
        **shaping_metrics(batch),
        **token_age_metrics(batch),
    }
    return resolve(metrics, "rollout/")


async def _learn(
    parts: Parts,
    learner: Learner,
    taken: TakenBatch,
    batch: TrainBatch,
    phases: _Phases,
    *,
    last: bool,
    is_told: bool,
) -> dict[str, float]:
    """Train on the batch, send the new weights, and save a checkpoint if one is due.
    The buffer's snapshot is taken before the buffer admits work for the new version;
    the checkpoint is written while that work runs. After the last step no more work is
    admitted. `is_told`: the console has already explained why no weight changes.
    Returns metric values."""
    step = phases.step
    version = WeightVersion(step)
    if learner.take_gpu is not None:
        with phases.within("gpu_turn"):
            await learner.take_gpu()
    with phases.within("train") as train_parts:
        result = await learner.trainer.train(batch)
        train_parts.update(result.seconds)
        for note in step_notes(step, result):
            if not is_told or result.optimizer_steps or result.nonfinite_steps:
                parts.observer.note(note)
        await parts.buffer.trained(taken.batch_id)
    if parts.record is not None and result.token_records:
        with phases.within("record"):
            warning = await asyncio.to_thread(
                parts.record, step, batch, result.token_records
            )
        if warning:
            parts.observer.note(warning)
    if parts.evaluations is not None:
        await parts.evaluations.before_update(step)
    with phases.within("sync") as sync_parts:
        update = await learner.sync(version)
        sync_parts.update(update.seconds)
        snapshot = None
        if last or learner.schedule.is_due(step):
            snapshot = await parts.buffer.snapshot(version)
        if not last:
            await parts.buffer.advance(version)
    if parts.trace is not None:
        await asyncio.to_thread(parts.trace, step, batch, dict(phases.times))
    if snapshot is not None:
        with phases.within(CHECKPOINT_PHASE):
            await learner.save(step, snapshot)
        learner.schedule.saved(phases.seconds[CHECKPOINT_PHASE])
    return {**train_values(result), **resolve(update_metrics(update), "sync/")}


def _early_end_note(last_step: int, num_steps: int, reason: FilteredOutError) -> str:
    return (
        f"the run ends after step {last_step} of {num_steps}: {reason}.\n"
        "    To go on: other tasks under another --run-name, a larger --max-filtered-batches, or "
        "--filtered-out train"
    )


async def _save_early(
    buffer: Buffer, learner: Learner, phases: _Phases, last_step: int
) -> None:
    """Save the checkpoint of the last step made, while the buffer has no batch out."""
    snapshot = await buffer.snapshot(WeightVersion(last_step))
    with phases.within(CHECKPOINT_PHASE):
        await learner.save(last_step, snapshot)


def step_notes(step: int, result: StepResult) -> Iterator[str]:
    """Yield sentences for the console if a batch did not change the weights as it
    should have."""
    if result.nonfinite_steps:
        yield (
            f"step {step}: {result.nonfinite_steps} optimizer steps were skipped, because the loss or the "
            "gradient was NaN or infinite (counted in train/nonfinite_steps; the trainer's log says more)"
        )
    elif not result.optimizer_steps and _critic_learned_alone(result.metrics):
        yield f"step {step}: the critic alone learns (--critic.warmup-steps)"
    elif not result.optimizer_steps and not result.metrics["skipped_steps"].value():
        yield f"step {step}: no weight was changed, because no row of the batch has a token to train"
    elif not result.optimizer_steps:
        yield (
            f"step {step}: no weight was changed. The gradient was 0: in every comparison all rewards were "
            "equal (counted in train/skipped_steps; --group-filter nonzero_variance replaces such groups)"
        )


def _critic_learned_alone(metrics: Metrics) -> bool:
    """Whether the critic made a step, and the policy was not meant to."""
    critic_steps = metrics.get("critic_steps")
    return (
        critic_steps is not None
        and critic_steps.value() > 0
        and not metrics["skipped_steps"].value()
    )


def train_values(result: StepResult) -> dict[str, float]:
    """Return the trainer's measurements as flat metric values."""
    seconds = {f"train/time/{name}_s": value for name, value in result.seconds.items()}
    return {**resolve(result.metrics, "train/"), **seconds}
