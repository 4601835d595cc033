"""Engines and trainer use the same GPUs by turns (`--colocate`).

    the engines' turn    rollouts run; the trainer holds only the weights that it computes with
    the trainer's turn   a step, and its weights staged; the engines are paused and have no memory for caches

    engines: pause, sleep ─► trainer: wake, train, stage, sleep ─► engines: load, wake,
    resume, canary

Invariant: the engines' caches and what the trainer needs to train are never in a GPU's
memory together. So no engine starts in the trainer's turn, and the trainer wakes when
no process of a lost engine is left. A turn of the trainer is the first part of a weight
update, which ends it: what fails in between is the update's. If every engine dies in
the trainer's turn, the update lets them start once the trainer sleeps, and waits for
the first that is back.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from invrl.interfaces import StagedWeights, WeightLayout, WeightSender
from invrl.types.weights import WeightUpdate, WeightVersion

logger = logging.getLogger(__name__)


class SleepingTrainer(WeightSender, Protocol):
    """A trainer that gives memory back. Both calls return the free bytes of the fullest
    GPU, without the memory that training needs."""

    async def sleep(self) -> int: ...

    async def wake(self) -> int: ...


class EngineStarts(Protocol):
    """Part of the fleet that starts and ends engines."""

    async def hold_starts(self) -> None:
        """Wait for starting engines, and block further starts until `allow_starts`."""

    def allow_starts(self) -> None: ...

    async def until_lost_have_ended(self) -> None:
        """Wait until the processes of all engines that left have ended."""


class SenderThatSleeps:
    """The trainer as the sender of an update: once its weights are staged it sleeps. An
    update that is made again, for engines that come back, gets what is staged."""

    def __init__(self, trainer: SleepingTrainer) -> None:
        self._trainer = trainer
        self._staged: StagedWeights | None = None
        """The weights staged last."""

    async def layout(self) -> WeightLayout:
        return await self._trainer.layout()

    async def stage(self, version: WeightVersion) -> StagedWeights:
        if self._staged is not None and self._staged.version == version:
            return self._staged
        staged = await self._trainer.stage(version)
        free = await self._trainer.sleep()
        logger.info(
            "the trainer sleeps: %.2f GB are free for the engines' caches", free / 1e9
        )
        self._staged = staged
        return staged

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return await self._trainer.logprobs(prompts)


class GpuTurns:
    """Turns of engines and trainer; the engines have the first. Call `give_to_trainer`
    and `update` alternately."""

    def __init__(
        self,
        trainer: SleepingTrainer,
        starts: EngineStarts,
        *,
        suspend: Callable[[], Awaitable[None]],
        update: Callable[[WeightVersion], Awaitable[WeightUpdate]],
    ) -> None:
        """`suspend`: pauses the engines, which sleep. `update`: gives them the
        trainer's weights, after which they generate and the trainer sleeps."""
        self._trainer = trainer
        self._starts = starts
        self._suspend = suspend
        self._update = update

    async def give_to_trainer(self) -> None:
        """Let the trainer train. Raises WeightSyncError, TrainError or DeadlineError;
        if no engine could be put to sleep, the engines keep their turn."""
        await self._starts.hold_starts()
        try:
            await self._suspend()
        except BaseException:
            self._starts.allow_starts()
            raise
        await self._starts.until_lost_have_ended()
        free = await self._trainer.wake()
        logger.info(
            "the engines sleep: %.2f GB were free when the trainer woke", free / 1e9
        )

    async def update(self, version: WeightVersion) -> WeightUpdate:
        """Update the engines. This ends the trainer's turn, even if the update
        fails."""
        try:
            return await self._update(version)
        finally:
            self._starts.allow_starts()
