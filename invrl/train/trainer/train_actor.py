"""A trainer rank as a Ray actor: it receives calls, runs them on `TrainRank` and
replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from invrl.interfaces import StagedWeights, StepResult, WeightLayout
from invrl.train.batches.sharding import Shard
from invrl.train.critic.critic_values import ValuesOfShard
from invrl.train.model.step_progress import StepPlace
from invrl.train.ranks.rank_actor import RankActor
from invrl.types.file_entry import FileEntries
from invrl.types.metrics import Metric
from invrl.types.weights import WeightVersion

if TYPE_CHECKING:
    from invrl.train.trainer.train_rank import TrainRank


class TrainActor(RankActor["TrainRank"]):
    """Runs all calls but `offer` and `place` in the worker. The methods are those of
    `TrainRank`."""

    role = "trainer"

    def _make(self, port: int) -> TrainRank:
        from invrl.train.trainer.train_rank import TrainRank

        return TrainRank(self._settings, port, self._listener)

    async def sleep(self) -> int:
        return await self._in_worker(self._rank.sleep)

    async def wake(self) -> int:
        return await self._in_worker(self._rank.wake)

    async def train(self, shard: Shard) -> StepResult:
        return await self._in_worker(self._rank.train, shard)

    async def place(self) -> StepPlace:
        """Return the current work, concurrently with the worker."""
        return self._rank.place()

    async def prepare(self, shard: Shard) -> None:
        await self._in_worker(self._rank.prepare, shard)

    async def compute_advantages(self, values: ValuesOfShard) -> ValuesOfShard:
        return await self._in_worker(self._rank.compute_advantages, values)

    async def learn(self, critic_learns_alone: bool) -> StepResult:
        return await self._in_worker(
            self._rank.learn, critic_learns_alone=critic_learns_alone
        )

    async def evaluate(self, shard: Shard) -> dict[str, Metric]:
        return await self._in_worker(self._rank.evaluate, shard)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return await self._in_worker(self._rank.logprobs, prompts)

    async def token_logprobs(self, shard: Shard) -> list[NDArray[np.float32]]:
        return await self._in_worker(self._rank.token_logprobs, shard)

    async def layout(self) -> WeightLayout:
        return await self._in_worker(self._rank.layout)

    async def stage(self, version: WeightVersion) -> StagedWeights | None:
        return await self._in_worker(self._rank.stage, version)

    async def bucket(self, index: int, copies: int) -> list[str] | None:
        return await self._in_worker(self._rank.bucket, index, copies)

    async def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """Offer weights, concurrently with the worker, which may be training."""
        return self._rank.offer(version, engines)

    async def copy_model(self, path: str) -> None:
        await self._in_worker(self._rank.copy_model, path)

    async def model_written(self) -> FileEntries:
        """Wait for what `copy_model` began, while the worker trains."""
        return await asyncio.wrap_future(self._rank.model_written)

    async def batches_trained(self) -> int:
        return await self._in_worker(self._rank.batches_trained)

    async def export_hugging_face(self, path: str) -> FileEntries:
        return await self._in_worker(self._rank.export_hugging_face, path)
