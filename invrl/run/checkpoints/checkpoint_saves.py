"""Saves checkpoints of a running trainer. If the disk is full, the run continues
without the checkpoint and tries again at the next save; only the last save waits for
space.

Invariant: the remains of a failed save are removed, so they take no space.
"""

import asyncio
from collections.abc import Callable

from invrl.host.files.disk import is_full
from invrl.host.files.disk_waits import until_written
from invrl.run.checkpoints.checkpoints import Checkpoints, CopyingTrainer


class CheckpointSaves:
    """`beside_training`: a save returns once the trainer has copied its state. `note`:
    receives a warning for the console."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: CopyingTrainer,
        *,
        beside_training: bool,
        note: Callable[[str], object],
    ) -> None:
        self._checkpoints = checkpoints
        self._trainer = trainer
        self._beside_training = beside_training
        self._note = note
        self._newest: tuple[int, bytes | None] | None = None
        """Step and snapshot of the last save, until it is complete."""

    async def save(self, step: int, snapshot: bytes | None = None) -> None:
        """Save the trainer as it is. If the disk is full, report that and return."""
        await self._end_earlier()
        self._newest = (step, snapshot)
        try:
            await self._save(step, snapshot)
        except Exception as error:
            await self._clear_after(step, error)
            return
        if not self._beside_training:
            self._newest = None

    async def finish(self) -> None:
        """Wait until the newest save is complete; if its disk is full, wait for space.
        The trainer must not have changed since that save."""
        await self._end_earlier()
        if self._newest is None:
            return
        step, snapshot = self._newest
        folder = self._checkpoints.folder

        async def save() -> None:
            try:
                await asyncio.to_thread(self._checkpoints.check_space)
                await self._checkpoints.save(self._trainer, step, snapshot)
            except Exception:
                await asyncio.to_thread(self._checkpoints.clear_partial)
                raise

        await until_written(folder, f"the checkpoint of step {step}", save)
        self._newest = None

    async def _save(self, step: int, snapshot: bytes | None) -> None:
        await asyncio.to_thread(self._checkpoints.check_space)
        save = self._checkpoints.save
        if self._beside_training:
            save = self._checkpoints.save_beside_training
        await save(self._trainer, step, snapshot)

    async def _end_earlier(self) -> None:
        """Wait for a save that runs alongside training."""
        if self._newest is None or not self._beside_training:
            return
        step, _ = self._newest
        try:
            await self._checkpoints.wait_until_saved()
        except Exception as error:
            await self._clear_after(step, error)
            return
        if self._checkpoints.is_whole(step):
            self._newest = None

    async def _clear_after(self, step: int, error: Exception) -> None:
        """Raise the error unless the disk is full."""
        if not is_full(error, self._checkpoints.folder):
            raise error
        await asyncio.to_thread(self._checkpoints.clear_partial)
        self._note(
            f"warning: the checkpoint of step {step} is not written: {error}. Training goes on, "
            "and the next save tries again"
        )
