"""Weights that the fleet holds, and a load of them that is proved by checksums."""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Sequence,
)
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.errors import ChecksumError
from invrl.interfaces import StagedWeights, WeightLayout, WeightReceiver

Load = Callable[[WeightReceiver, StagedWeights], Awaitable[None]]


async def load_alone(receiver: WeightReceiver, staged: StagedWeights) -> None:
    await receiver.load(staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """Weights that the fleet holds: enough to give them to an engine that joins
    later."""

    staged: StagedWeights
    layout: WeightLayout
    canary_prompts: Sequence[Sequence[int]]
    """Prompts by which an engine proves that it computes with these weights as the
    trainer does."""
    canary: NDArray[np.float32] | None = None
    """Trainer's log-probs of the canary prompts under these weights, concatenated. None
    before the update's canary, or without canary prompts."""


async def load_verified(
    receiver: WeightReceiver, staged: StagedWeights, load: Load = load_alone
) -> None:
    """Load, then raise ChecksumError unless the engine's parameters hash to what was
    sent."""
    await load(receiver, staged)
    held = await receiver.checksums(staged)
    num_tensors = len(staged.checksums)
    wrong = [
        name for name, value in staged.checksums.items() if held.get(name) != value
    ]
    if wrong:
        reason = f"{len(wrong)} of {num_tensors} tensors are not what was sent, {wrong[0]} first"
        raise ChecksumError(reason, engine=receiver.name)
    if len(held) != num_tensors:
        reason = f"{len(held)} tensors were hashed, {num_tensors} were sent"
        raise ChecksumError(reason, engine=receiver.name)
