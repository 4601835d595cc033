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
from invrl.host.files.disk_waits import write_patiently, written_in_thread
from invrl.observe.sinks.phases import observed_phase, report_span
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.checkpoint_scores import HELD_OUT_LOSS, held_out_losses
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.checkpoints.unsaved_weights import no_buffer
from invrl.run.incarnations.data import check_unchanged
from invrl.run.incarnations.run_parts import RunParts
from invrl.run.loop.loop import step_notes, train_values
from invrl.run.processes.background import in_background
from invrl.run.processes.cluster import start_trainer
from invrl.run.processes.process_samples import sample_memory
from invrl.store.batch_file import batch_path, save_batch
from invrl.store.metrics_file import read_metrics
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve, timed

_MAX_NOTED_ROWS = 5
"""Unusable rows that the console names; all are counted."""


async def train_on_data(run: RunParts, data: Dataset) -> None:
    """Make the steps after the start, with the held-out loss before and after them, and
    save checkpoints. SGLang need not be installed. Raises InvrlError with the cause of
    a failure."""
    if run.is_over():
        return
    check_unchanged(run.config, run.folder, first_step=run.start.step)
    started_at = time.monotonic()
    async with (
        run.running(),
        start_trainer(run.config, run.folder, run.starting) as trainer,
    ):
        run.awaited.questions["train"] = trainer.place_text
        run.awaited.questions["evaluating"] = trainer.place_text
        await run.load_checkpoint(trainer)
        report_span(run.observer, "starting", 0, began=started_at)
        steps = _DataSteps(run, data, trainer, run.saves(trainer))
        interval_s = run.config.run.metrics.sample_interval_s
        try:
            async with in_background(sample_memory(trainer, run.observer, interval_s)):
                training = first_to_fail(steps.train(), run.checkpoints.watch())
                await first_to_fail(training, trainer.watch())
        except (Exception, asyncio.CancelledError) as error:
            await run.save_at_end(trainer, error, no_buffer)
            raise
    await write_patiently(run.folder.finished_path, str(run.num_steps))


@dataclass(frozen=True, slots=True)
class _DataSteps:
    """Steps of one incarnation."""

    run: RunParts
    data: Dataset
    trainer: TrainHandle
    saves: CheckpointSaves

    async def train(self) -> None:
        held_out = await asyncio.to_thread(self.data.held_out_batch)
        loss_before = await self._loss_before(held_out)
        await self._make_steps(held_out)
        await self.saves.finish()
        loss_after = self._recorded_loss(self.run.num_steps)
        if held_out is not None and loss_before is not None and loss_after is not None:
            size = f"{len(self.data.held_out):,} rows, {held_out.trained.tokens:,} trained tokens"
            self.run.observer.note(
                f"held-out loss ({size}): {loss_before:.4f} -> {loss_after:.4f}"
            )
        self.run.show_model(self.run.num_steps)

    async def _make_steps(self, held_out: TrainBatch | None) -> None:
        schedule = self.run.schedule()
        schedule.begin()
        num_unusable = 0
        reading = asyncio.create_task(self._read(self.run.start.step + 1))
        try:
            for step in range(self.run.start.step + 1, self.run.num_steps + 1):
                started_at = time.monotonic()
                step_data = await reading
                if step < self.run.num_steps:
                    reading = asyncio.create_task(self._read(step + 1))
                if step == self.run.start.step + 1:
                    self._show_example(step_data)
                self._note_unusable(step, step_data, num_unusable)
                num_unusable += len(step_data.unusable)
                values = await self._train(step, step_data)
                values["time/step_s"] = time.monotonic() - started_at
                if step == self.run.num_steps or schedule.is_due(step):
                    values["time/checkpoint_s"] = await self._save(step, schedule)
                if held_out is not None and self._is_evaluated(step):
                    values |= await self._evaluate(step, held_out)
                self.run.observer.step(step, values)
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    async def _read(self, step: int) -> StepData:
        """Read a step's data in a thread, while the trainer makes the previous step."""
        return await asyncio.to_thread(self.data.step, step)

    async def _train(self, step: int, step_data: StepData) -> dict[str, float]:
        """Make one step. Returns its metric values."""
        with observed_phase(self.run.observer, "train", step) as parts:
            if self.run.config.run.save_rollout_data:
                path = batch_path(self.run.folder.rollout_data_path, step)
                await written_in_thread(
                    self.run.folder.path, path.name, save_batch, path, step_data.batch
                )
            result = await self.trainer.train(step_data.batch)
            parts.update(result.seconds)
        for note in step_notes(step, result):
            self.run.observer.note(note)
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
        with (
            observed_phase(self.run.observer, "checkpoint", step),
            timed(seconds, "save"),
        ):
            await self.saves.save(step)
        schedule.saved(seconds["save"])
        return seconds["save"]

    def _is_evaluated(self, step: int) -> bool:
        interval = self.run.config.rollout.eval.interval
        is_due = interval is not None and step % interval == 0
        return is_due or step == self.run.num_steps

    async def _evaluate(self, step: int, held_out: TrainBatch) -> Mapping[str, float]:
        with observed_phase(self.run.observer, "evaluating", step):
            return resolve(await self.trainer.evaluate(held_out), "eval/")

    async def _loss_before(self, held_out: TrainBatch | None) -> float | None:
        """Return the held-out loss before step 1, measured once in a run: a later
        incarnation reads it back."""
        if held_out is None:
            return None
        if not self.run.start.step:
            values = await self._evaluate(0, held_out)
            self.run.observer.step(0, values)
            return values[HELD_OUT_LOSS]
        return self._recorded_loss(0)

    def _recorded_loss(self, step: int) -> float | None:
        """Return the step's held-out loss in the metrics; None if they lack it."""
        return held_out_losses(read_metrics(self.run.folder.metrics_path)).get(step)

    def _show_example(self, step_data: StepData) -> None:
        samples = step_data.batch.samples
        if samples and self.run.config.run.log.samples:
            text = self.data.tokenizer.shown(samples[0])
            self.run.observer.note(
                f"the first row, what is trained of it in [[ ]]:\n{text}"
            )

    def _note_unusable(self, step: int, step_data: StepData, num_noted: int) -> None:
        for sentence in step_data.unusable[: max(0, _MAX_NOTED_ROWS - num_noted)]:
            self.run.observer.note(f"step {step} goes without a row: {sentence}")
