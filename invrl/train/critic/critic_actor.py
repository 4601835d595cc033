"""A rank of a critic on separate ranks, as a Ray actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.interfaces import StepResult
from invrl.train.batches.sharding import Shard
from invrl.train.critic.critic_values import CriticValues, ValuesOfShard
from invrl.train.ranks.rank_actor import RankActor

if TYPE_CHECKING:
    from invrl.train.critic.critic_rank import CriticRank


class CriticActor(RankActor["CriticRank"]):
    """The methods are those of `CriticRank`."""

    role = "critic"

    def _make(self, port: int) -> CriticRank:
        from invrl.train.critic.critic_rank import CriticRank

        return CriticRank(self._settings, port, self._listener)

    async def values(self, shard: Shard) -> CriticValues:
        return await self._in_worker(self._rank.values, shard)

    async def learn(self, returns: ValuesOfShard) -> StepResult:
        return await self._in_worker(self._rank.learn, returns)
