"""Saves unsaved training when a run ends before its last step.

When an interrupt ends a run, the trainer's progress since the last checkpoint is saved
as another checkpoint, from which the run resumes. After a failure outside of the
trainer only the weights are saved, as a Hugging Face folder: they may be the cause.
Invariant: an error here is shown, but never hides the error that ended the run.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from invrl.host.files.disk import is_full
from invrl.interfaces import Trainer
from invrl.run.checkpoints.checkpoint import keep_model
from invrl.run.checkpoints.checkpoints import Checkpoints
from invrl.train.adapters.peft_folder import is_peft_folder

SAVE_AFTER_INTERRUPT_S = 120.0
"""Seconds for the trainer's current batch, and for saving the weights after it."""
TakeSnapshot = Callable[[int], Awaitable[bytes | None]]
"""Returns the buffer's snapshot for the checkpoint of a step; None for a run without a
buffer."""
logger = logging.getLogger(__name__)


async def no_buffer(_step: int) -> None:
    """Return None, as the `TakeSnapshot` of a run without rollouts."""


class CountingTrainer(Trainer, Protocol):
    """A trainer that counts its batches, including one whose result nobody awaits any
    more."""

    async def batches_trained(self) -> int:
        """Return the batches since the trainer started, after finishing one in
        progress."""
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
    """Save the trainer's newest weights. `first_step`: step of the weights that the
    trainer started with. `note` receives their place, or the reason that they could not
    be saved. `take_snapshot`: makes a checkpoint of them; without it only the weights
    are saved."""
    try:
        async with asyncio.timeout(timeout_s):
            await _wait_for_earlier_save(checkpoints)
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
        keep_model(checkpoints.saved_model_folder(checkpoints.saved_step))
        note(_describe_weights(checkpoints, checkpoints.saved_step))


async def _wait_for_earlier_save(checkpoints: Checkpoints) -> None:
    """Wait for a save that runs alongside training. If that has found no space, the
    next one may."""
    try:
        await checkpoints.wait_until_saved()
    except Exception as error:
        if not is_full(error):
            raise


async def _save_checkpoint(
    trainer: Trainer, checkpoints: Checkpoints, step: int, take_snapshot: TakeSnapshot
) -> None:
    """Save a checkpoint, or only the weights if the buffer has died and gives no
    snapshot."""
    try:
        snapshot = await take_snapshot(step)
    except Exception as error:
        logger.warning("the buffer gave no snapshot of step %d", step, exc_info=error)
        await checkpoints.save_model(trainer, step)
        return
    await checkpoints.save(trainer, step, snapshot)


def _reason(error: Exception, timeout_s: float) -> str:
    """Return the reason in one line."""
    if isinstance(error, TimeoutError):
        return f"not within {timeout_s:g} s"
    lines = str(error).splitlines()
    if not lines:
        return repr(error)
    return lines[0]


def _describe_weights(checkpoints: Checkpoints, step: int) -> str:
    """Describe where the weights of a step are, and how to use them."""
    model = checkpoints.saved_model_folder(step)
    latest = checkpoints.latest()
    resume = "there is no checkpoint to resume from"
    if latest is not None:
        resume = f"a run resumes from step {latest.step}"
    use = "for --model-path"
    if is_peft_folder(model):
        use = "an adapter, which `invrl export` merges"
    return f"model of step {step}: {model} ({use}; {resume})"
