"""Shards of a batch, one per rank: mini-batches first, then their samples over the
ranks by cost.

Invariant: the contents of a mini-batch, and its loss denominator, do not depend on the
number of ranks. A rank here is a data-parallel replica: all ranks that hold one copy of
the model work on the same shard. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from invrl.train.batches.balance import balance
from invrl.train.cost.model_size import UNKNOWN_MODEL, ComputeCost
from invrl.types.batches import TrainBatch, TrainedCounts

Shard = tuple[TrainBatch, ...]
"""Work of one rank: its share of each mini-batch, in order; each mini-batch is one
optimizer step. The share's `counts` are those of the whole mini-batch over all ranks:
the denominators of its loss."""

Item = TypeVar("Item")


def shard_batch(
    batch: TrainBatch, *, ranks: int, steps: int, cost: ComputeCost = UNKNOWN_MODEL
) -> list[Shard]:
    """Make one shard per data-parallel rank, of at most `steps` mini-batches. `cost` is
    of the model's forward pass."""
    shares_by_step = [
        _shares(mini_batch, ranks, cost) for mini_batch in mini_batches(batch, steps)
    ]
    return [tuple(shares[rank] for shares in shares_by_step) for rank in range(ranks)]


def mini_batches(batch: TrainBatch, steps: int) -> list[TrainBatch]:
    """Return whole groups, in order, in at most `steps` parts of about equally many
    groups.

    With fewer groups than steps there are fewer parts. Parts in which nothing is
    trained are left out.
    """
    groups = list(dict.fromkeys(sample.group_id for sample in batch.samples))
    num_parts = min(steps, len(groups))
    part_of_group = {
        group: index * num_parts // len(groups) for index, group in enumerate(groups)
    }
    indices_by_part: list[list[int]] = [[] for _ in range(num_parts)]
    for index, sample in enumerate(batch.samples):
        indices_by_part[part_of_group[sample.group_id]].append(index)
    parts: list[TrainBatch] = []
    for indices in indices_by_part:
        part = _select(batch, indices)
        counts = TrainedCounts.of(part.samples)
        if counts.samples:
            parts.append(replace(part, counts=counts))
    return parts


def by_sample(
    shards: Iterable[Shard], items: Iterable[Iterable[Item]]
) -> dict[int, Item]:
    """Return the items by the `id` of their sample. Each shard has one for each of its
    samples, in order."""
    item_of: dict[int, Item] = {}
    for shard, items_of_shard in zip(shards, items, strict=True):
        samples = [sample for mini_batch in shard for sample in mini_batch.samples]
        for sample, item in zip(samples, items_of_shard, strict=True):
            item_of[id(sample)] = item
    return item_of


def _select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """Select these samples; `counts` stay those of the whole batch."""
    samples = tuple(batch.samples[index] for index in indices)
    advantages = tuple(batch.advantages[index] for index in indices)
    return replace(batch, samples=samples, advantages=advantages)


def _shares(batch: TrainBatch, ranks: int, cost: ComputeCost) -> list[TrainBatch]:
    """Return one share per rank, of about equal work."""
    if ranks == 1:
        return [batch]
    return [_select(batch, indices) for indices in balance(batch, ranks, cost)]
