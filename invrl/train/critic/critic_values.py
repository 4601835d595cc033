"""Numbers of a shard's tokens that pass between the ranks of policy and critic through
the driver."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from invrl.train.batches.sharding import Shard, by_sample

ValuesOfShard = list[list[NDArray[np.float32]]]
"""Numbers by mini-batch and sample, in the shard's order: [T] each, 0 for untrained
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticValues:
    """Output of a critic's rank for a shard."""

    values: ValuesOfShard
    learns_alone: bool
    """Whether the policy makes no step on this batch."""


def reorder_values(
    shards: Sequence[Shard],
    other_shards: Sequence[Shard],
    values: Iterable[ValuesOfShard],
) -> list[ValuesOfShard]:
    """Reorder the numbers of `other_shards`, one entry each, for `shards`: the same
    samples, divided in another way."""
    arrays = [chain.from_iterable(of_shard) for of_shard in values]
    of_sample = by_sample(other_shards, arrays)
    return [
        [[of_sample[id(sample)] for sample in part.samples] for part in shard]
        for shard in shards
    ]
