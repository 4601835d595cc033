"""Saves the weights that nothing on disk holds yet, where a run ends before its last step.

An interrupt, or the failure of something else than the trainer, ends a run whose trainer is well: what it has
learnt since the last checkpoint is saved as a Hugging Face folder. Invariant: nothing that happens here hides
what ended the run."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from invrl.interfaces import Trainer
from invrl.run.checkpoints import Checkpoints

logger = logging.getLogger(__name__)


class CountingTrainer(Trainer, Protocol):
    """A trainer that knows how far it is, also after nobody waits for its last batch any more."""

    async def batches_trained(self) -> int:
        """Since its start; it ends the batch that it is at first."""
        ...


async def save_last_weights(
    trainer: CountingTrainer,
    checkpoints: Checkpoints,
    *,
    begun_at: int,
    within_s: float,
    note: Callable[[str], object],
) -> None:
    """`begun_at`: the step of the weights that the trainer began with. Tells `note` where the newest weights
    are, or why they could not be saved."""
    try:
        async with asyncio.timeout(within_s):
            step = begun_at + await trainer.batches_trained()
            if step == begun_at:
                return
            if step != checkpoints.saved_step:
                note(f"saving the weights of step {step} before the end ...")
                await checkpoints.save_model(trainer, step)
    except Exception as error:
        logger.warning("the newest weights could not be saved", exc_info=error)
        reason = f"not within {within_s:g} s" if isinstance(error, TimeoutError) else str(error)
        note(f"the newest weights could not be saved: {reason.splitlines()[0] if reason else repr(error)}")
    if checkpoints.saved_step is not None:
        note(_where(checkpoints, checkpoints.saved_step))


def _where(checkpoints: Checkpoints, step: int) -> str:
    """What a person can do with the newest weights."""
    path: Path = checkpoints.model_of(step)
    latest = checkpoints.latest()
    on = f"a run goes on from step {latest.step}" if latest else "there is no checkpoint to go on from"
    return f"model of step {step}: {path} (for --model-path; {on})"
