"""Optimizer steps that were skipped because a loss or the gradient is NaN or infinite,
counted in a row."""

import logging
import math
from collections.abc import Sequence

import torch

from invrl.errors import TrainError
from invrl.types.batches import TrainBatch

logger = logging.getLogger(__name__)


def on_host(losses: Sequence[torch.Tensor]) -> list[float]:
    """Return the scalars' values. Waits for the device, once for all of them."""
    if not losses:
        return []
    return torch.stack([loss.detach().double() for loss in losses]).tolist()


def nonfinite(losses: Sequence[torch.Tensor]) -> list[float]:
    """Return those of the scalars that are NaN or infinite. Waits for the device, once
    for all of them."""
    return [value for value in on_host(losses) if not math.isfinite(value)]


class NonfiniteSteps:
    """Counts skipped steps. The last of `limit` in a row ends the run."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def end(self) -> None:
        """Reset the count after a finite step."""
        self._in_a_row = 0

    def count(
        self, mini_batch: TrainBatch, grad_norm: float, bad_losses: Sequence[float]
    ) -> None:
        """Log a skipped step, and raise TrainError if it was one too many. `bad_losses`
        are those of this rank that are not finite."""
        self._in_a_row += 1
        if bad_losses:
            found = f"a loss of {bad_losses[0]} on this rank"
        elif math.isnan(grad_norm):
            found = "a loss or a gradient that is NaN"
        else:
            found = "an infinite gradient"
        sentence = (
            f"batch {mini_batch.batch_id} has {found}: no weight was changed "
            f"({self._in_a_row} of at most {self._limit} such steps in a row)"
        )
        logger.warning("%s", sentence)
        if self._in_a_row >= self._limit:
            raise TrainError(
                f"{sentence}. If the model has learned until here, lower --lr or set --clip-grad; if it "
                "never has, look at the model folder and at a policy loss of your own; --max-nonfinite-steps "
                "is the number that ends a run"
            )
