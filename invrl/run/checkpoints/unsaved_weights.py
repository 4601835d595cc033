"""Saves what no checkpoint holds when a run ends before its last step.

When an interrupt ends a run, the trainer still has what it learnt since the last
checkpoint: that is saved as another checkpoint, from which the run resumes. After a
failure outside of the trainer only the weights are saved, as a Hugging Face folder:
they may be what failed. Invariant: an error here is shown, but never hides the error
that ended the run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from invrl.host.disk import is_full
from invrl.interfaces import Trainer
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoints import Checkpoints

SAVE_AFTER_INTERRUPT_S = 120.0
"""For the batch that the trainer is at, and for saving the weights after it."""
TakeSnapshot = Callable[[int], Awaitable[bytes | None]]
"""The buffer's snapshot for the checkpoint of a step; None for a run that has no
buffer."""
logger = logging.getLogger(__name__)


async def no_buffer(_step: int) -> None:
    """The `TakeSnapshot` of a run without rollouts."""


class CountingTrainer(Trainer, Protocol):
    """A trainer that counts its batches, including one whose result nobody awaits any
    more."""

    async def batches_trained(self) -> int:
        """Batches since the trainer started. A batch that is in progress is finished
        first."""
        ...


async def save_unsaved_weights(
    trainer: CountingTrainer,
    checkpoints: Checkpoints,
    *,
    first_step: int,
    timeout_s: float,
    note: Callable[[str], object],
    take_snapshot: TakeSnapshot | None = None,
) -> None:
    """`first_step`: the step of the weights that the trainer started with. `note`
    receives where the newest weights are, or why they could not be saved.
    `take_snapshot`: makes a checkpoint of them; without it the weights are saved
    alone."""
    try:
        async with asyncio.timeout(timeout_s):
            await checkpoints.wait_until_saved()
            step = first_step + await trainer.batches_trained()
            if step == first_step:
                return
            if step != checkpoints.saved_step:
                note(f"saving step {step} before the end ...")
                if take_snapshot is None:
                    await checkpoints.save_model(trainer, step)
                else:
                    await _save_checkpoint(trainer, checkpoints, step, take_snapshot)
    except Exception as error:
        logger.warning("the newest weights could not be saved", exc_info=error)
        if is_full(error):
            checkpoints.clear_partial()
        note(f"the newest weights could not be saved: {_reason(error, timeout_s)}")
    if checkpoints.saved_step is not None:
        keep_model(checkpoints.model_of(checkpoints.saved_step))
        note(_describe_weights(checkpoints, checkpoints.saved_step))


async def _save_checkpoint(
    trainer: Trainer, checkpoints: Checkpoints, step: int, take_snapshot: TakeSnapshot
) -> None:
    """Without a snapshot, because the buffer has died, the weights alone."""
    try:
        snapshot = await take_snapshot(step)
    except Exception as error:
        logger.warning("the buffer gave no snapshot of step %d", step, exc_info=error)
        await checkpoints.save_model(trainer, step)
        return
    await checkpoints.save(trainer, step, snapshot)


def _reason(error: Exception, timeout_s: float) -> str:
    """One line."""
    if isinstance(error, TimeoutError):
        return f"not within {timeout_s:g} s"
    lines = str(error).splitlines()
    if not lines:
        return repr(error)
    return lines[0]


def _describe_weights(checkpoints: Checkpoints, step: int) -> str:
    """Where the weights of a step are, and what can be done with them."""
    model = checkpoints.model_of(step)
    latest = checkpoints.latest()
    resume = "there is no checkpoint to resume from"
    if latest is not None:
        resume = f"a run resumes from step {latest.step}"
    return f"model of step {step}: {model} (for --model-path; {resume})"
