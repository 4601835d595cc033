"""Parts that every incarnation has, with and without rollouts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from invrl.errors import ServerError
from invrl.host.files.disk_waits import watch_disks
from invrl.host.processes import interrupts
from invrl.observe.sinks.sinks import RunObserver
from invrl.rollout.dispatch.dispatcher import first_to_fail
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoint_saves import CheckpointSaves
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.run.checkpoints.resume import Start, describe_start, is_finished
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.checkpoints.unsaved_weights import (
    SAVE_AFTER_INTERRUPT_S,
    TakeSnapshot,
    save_unsaved_weights,
)
from invrl.run.processes.background import in_background
from invrl.run.processes.phase_progress import PhaseProgress, StartingParts
from invrl.run.settings.config import Config
from invrl.store.run_folder import RunFolder
from invrl.train.trainer.train_handle import TrainHandle


@dataclass(frozen=True, slots=True)
class RunParts:
    """One incarnation of a run of `num_steps` steps."""

    config: Config
    folder: RunFolder
    checkpoints: Checkpoints
    observer: RunObserver
    start: Start
    num_steps: int
    awaited: PhaseProgress
    starting: StartingParts = field(default_factory=StartingParts, init=False)

    def is_over(self) -> bool:
        """Show where the incarnation starts. Returns whether no step is left."""
        where = describe_start(self.folder, self.start, num_steps=self.num_steps)
        self.observer.note(where)
        return is_finished(self.folder, self.start, num_steps=self.num_steps)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Mark the run as unfinished, report what it waits for, and watch its disks
        within the block."""
        self.observer.phase("starting", 0)
        self.folder.finished_path.unlink(missing_ok=True)
        self.awaited.questions["starting"] = self.starting.text
        async with (
            in_background(self.awaited.report()),
            in_background(watch_disks(self.folder.path)),
        ):
            yield

    async def load_checkpoint(self, trainer: TrainHandle) -> None:
        """Load the checkpoint that the incarnation starts from, if there is one."""
        if self.start.checkpoint is not None:
            await trainer.load_checkpoint(str(self.start.checkpoint.megatron))

    def saves(self, trainer: TrainHandle) -> CheckpointSaves:
        return CheckpointSaves(
            self.checkpoints,
            trainer,
            beside_training=self.config.run.checkpoints.background,
            note=self.observer.note,
        )

    def schedule(self) -> SaveSchedule:
        run = self.config.run
        return SaveSchedule(steps=run.save_interval, seconds=run.checkpoints.interval_s)

    async def save_at_end(
        self, trainer: TrainHandle, error: BaseException, take_snapshot: TakeSnapshot
    ) -> None:
        """Save what the trainer has learned before `error` ended the run: a checkpoint
        after an interrupt, otherwise only the weights."""
        interrupted = isinstance(error, asyncio.CancelledError)
        timeout_s = self.config.train.train_step_timeout_s
        if interrupted:
            timeout_s = min(timeout_s, SAVE_AFTER_INTERRUPT_S)
            interrupts.allow_more(timeout_s)
        saving = save_unsaved_weights(
            trainer,
            self.checkpoints,
            first_step=self.start.step,
            timeout_s=timeout_s,
            note=self.observer.note,
            take_snapshot=take_snapshot if interrupted else None,
        )
        try:
            await first_to_fail(saving, trainer.watch())
        except ServerError as failure:  # a rank no longer replies
            self.observer.note(f"the newest weights could not be saved: {failure}")

    def show_model(self, step: int) -> None:
        """Show the model of the last step, if there is one. It stays from now on."""
        model = self.checkpoints.saved_model_folder(step)
        if model.is_dir():
            keep_model(model)
            self.observer.note(f"model: {model}")
