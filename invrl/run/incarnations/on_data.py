"""`invrl train --objective sft --data-path FILE`: the trainer alone, on a file of
conversations, pairs or labelled replies.

Invariant: a step's samples depend only on the settings and the step
(`datasets/order.py`), so a resumed run makes the steps that an uninterrupted one would
have made.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from invrl.datasets.dataset import Dataset, StepData
from invrl.errors import ServerError
from invrl.host.files.disk_waits import watch_disks, write_patiently, written_in_thread
from invrl.host.processes import interrupts
from invrl.observe.sinks.phases import observed_phase, report_span
from invrl.observe.sinks.sinks import RunObserver
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.checkpoint_scores import HELD_OUT_LOSS, held_out_losses
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.resume import Start, describe_start, is_finished
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.checkpoints.unsaved_weights import (
    SAVE_AFTER_INTERRUPT_S,
    no_buffer,
    save_unsaved_weights,
)
from invrl.run.incarnations.data import check_unchanged
from invrl.run.loop.loop import step_notes, train_values
from invrl.run.processes.background import in_background
from invrl.run.processes.cluster import start_trainer
from invrl.run.processes.phase_progress import PhaseProgress, StartingParts
from invrl.run.processes.process_samples import sample_memory
from invrl.run.settings.config import Config
from invrl.store.batch_file import batch_path, save_batch
from invrl.store.metrics_file import read_metrics
from invrl.store.run_folder import RunFolder
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve, timed

_MAX_NOTED_ROWS = 5
"""Unusable rows that the console names; all are counted."""


async def train_on_data(
    config: Config,
    folder: RunFolder,
    checkpoints: Checkpoints,
    observer: RunObserver,
    start: Start,
    data: Dataset,
    awaited: PhaseProgress,
) -> None:
    """Make the steps after `start`, with the held-out loss before and after them, and
    save checkpoints. SGLang need not be installed. Raises InvrlError with the cause of
    a failure."""
    last_step = data.order.last_step(config.run.num_steps)
    observer.note(describe_start(folder, start, num_steps=last_step))
    if is_finished(folder, start, num_steps=last_step):
        return
    check_unchanged(config, folder, first_step=start.step)
    started_at = time.monotonic()
    observer.phase("starting", 0)
    folder.finished_path.unlink(missing_ok=True)
    starting = StartingParts()
    awaited.questions["starting"] = starting.text
    async with (
        in_background(awaited.report()),
        in_background(watch_disks(folder.path)),
        start_trainer(config, folder, starting) as trainer,
    ):
        awaited.questions["train"] = trainer.place_text
        awaited.questions["evaluating"] = trainer.place_text
        if start.checkpoint is not None:
            await trainer.load_checkpoint(str(start.checkpoint.megatron))
        report_span(observer, "starting", 0, began=started_at)
        saves = CheckpointSaves(
            checkpoints,
            trainer,
            beside_training=config.run.checkpoints.background,
            note=observer.note,
        )
        run = _DataRun(
            config,
            folder,
            checkpoints,
            observer,
            start.step,
            data,
            last_step,
            trainer,
            saves,
        )
        try:
            async with in_background(
                sample_memory(trainer, observer, config.run.metrics.sample_interval_s)
            ):
                training = first_to_fail(run.train(), checkpoints.watch())
                await first_to_fail(training, trainer.watch())
        except (Exception, asyncio.CancelledError) as error:
            await run.save_unsaved_weights(
                interrupted=isinstance(error, asyncio.CancelledError)
            )
            raise
    await write_patiently(folder.finished_path, str(last_step))


@dataclass(frozen=True, slots=True)
class _DataRun:
    """Steps of one incarnation."""

    config: Config
    folder: RunFolder
    checkpoints: Checkpoints
    observer: RunObserver
    first_step: int
    """Last step that was made before."""
    data: Dataset
    last_step: int
    trainer: TrainHandle
    saves: CheckpointSaves

    async def train(self) -> None:
        held_out = await asyncio.to_thread(self.data.held_out_batch)
        loss_before = await self._loss_before(held_out)
        await self._make_steps(held_out)
        await self.saves.finish()
        loss_after = self._recorded_loss(self.last_step)
        if held_out is not None and loss_before is not None and loss_after is not None:
            size = f"{len(self.data.held_out):,} rows, {held_out.trained.tokens:,} trained tokens"
            self.observer.note(
                f"held-out loss ({size}): {loss_before:.4f} -> {loss_after:.4f}"
            )
        checkpoint = self.checkpoints.latest()
        if checkpoint:
            keep_model(checkpoint.hugging_face)
            self.observer.note(f"model: {checkpoint.hugging_face}")

    async def _make_steps(self, held_out: TrainBatch | None) -> None:
        schedule = SaveSchedule(
            steps=self.config.run.save_interval,
            seconds=self.config.run.checkpoints.interval_s,
        )
        schedule.begin()
        num_unusable = 0
        reading = asyncio.create_task(self._read(self.first_step + 1))
        try:
            for step in range(self.first_step + 1, self.last_step + 1):
                started_at = time.monotonic()
                step_data = await reading
                if step < self.last_step:
                    reading = asyncio.create_task(self._read(step + 1))
                if step == self.first_step + 1:
                    self._show_example(step_data)
                self._note_unusable(step, step_data, num_unusable)
                num_unusable += len(step_data.unusable)
                values = await self._train(step, step_data)
                values["time/step_s"] = time.monotonic() - started_at
                if step == self.last_step or schedule.is_due(step):
                    values["time/checkpoint_s"] = await self._save(step, schedule)
                if held_out is not None and self._is_evaluated(step):
                    values |= await self._evaluate(step, held_out)
                self.observer.step(step, values)
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _read(self, step: int) -> StepData:
        """Read a step's data in a thread, while the trainer makes the previous step."""
        return await asyncio.to_thread(self.data.step, step)

    async def _train(self, step: int, step_data: StepData) -> dict[str, float]:
        """Make one step. Returns its metric values."""
        with observed_phase(self.observer, "train", step) as parts:
            if self.config.run.save_rollout_data:
                path = batch_path(self.folder.rollout_data_path, step)
                await written_in_thread(
                    self.folder.path, path.name, save_batch, path, step_data.batch
                )
            result = await self.trainer.train(step_data.batch)
            parts.update(result.seconds)
        for note in step_notes(step, result):
            self.observer.note(note)
        order = self.data.order
        return {
            **train_values(result),
            "data/rows": float(step_data.rows),
            "data/skipped_rows": float(step_data.skipped),
            "data/unusable_rows": float(len(step_data.unusable)),
            "data/epoch": ((step - 1) * order.batch_size + step_data.rows)
            / order.num_rows,
        }

    async def _save(self, step: int, schedule: SaveSchedule) -> float:
        """Save a checkpoint. Returns the seconds that the run waited for it."""
        seconds: dict[str, float] = {}
        with observed_phase(self.observer, "checkpoint", step), timed(seconds, "save"):
            await self.saves.save(step)
        schedule.saved(seconds["save"])
        return seconds["save"]

    def _is_evaluated(self, step: int) -> bool:
        interval = self.config.rollout.eval.interval
        is_due = interval is not None and step % interval == 0
        return is_due or step == self.last_step

    async def _evaluate(self, step: int, held_out: TrainBatch) -> Mapping[str, float]:
        with observed_phase(self.observer, "evaluating", step):
            return resolve(await self.trainer.evaluate(held_out), "eval/")

    async def _loss_before(self, held_out: TrainBatch | None) -> float | None:
        """Return the held-out loss before step 1, measured once in a run: a later
        incarnation reads it back."""
        if held_out is None:
            return None
        if not self.first_step:
            values = await self._evaluate(0, held_out)
            self.observer.step(0, values)
            return values[HELD_OUT_LOSS]
        return self._recorded_loss(0)

    def _recorded_loss(self, step: int) -> float | None:
        """Return the step's held-out loss in the metrics; None if they lack it."""
        return held_out_losses(read_metrics(self.folder.metrics_path)).get(step)

    def _show_example(self, step_data: StepData) -> None:
        samples = step_data.batch.samples
        if samples and self.config.run.log.samples:
            text = self.data.tokenizer.shown(samples[0])
            self.observer.note(
                f"the first row, what is trained of it in [[ ]]:\n{text}"
            )

    def _note_unusable(self, step: int, step_data: StepData, num_noted: int) -> None:
        for sentence in step_data.unusable[: max(0, _MAX_NOTED_ROWS - num_noted)]:
            self.observer.note(f"step {step} goes without a row: {sentence}")

    async def save_unsaved_weights(self, *, interrupted: bool) -> None:
        """Save the weights when the run ends before its last step."""
        timeout_s = self.config.train.train_step_timeout_s
        if interrupted:
            timeout_s = min(timeout_s, SAVE_AFTER_INTERRUPT_S)
            interrupts.allow_more(timeout_s)
        saving = save_unsaved_weights(
            self.trainer,
            self.checkpoints,
            first_step=self.first_step,
            timeout_s=timeout_s,
            note=self.observer.note,
            take_snapshot=no_buffer if interrupted else None,
        )
        try:
            await first_to_fail(saving, self.trainer.watch())
        except ServerError as error:  # a rank no longer answers
            self.observer.note(f"the newest weights could not be saved: {error}")
