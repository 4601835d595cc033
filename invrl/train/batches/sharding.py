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
    shares_by_step: list[list[TrainBatch]] = []
    for mini_batch in mini_batches(batch, steps):
        shares = _shares(mini_batch, ranks, cost)
        shares_by_step.append(shares)
    return [tuple(shares[rank] for shares in shares_by_step) for rank in range(ranks)]


def mini_batches(batch: TrainBatch, steps: int) -> list[TrainBatch]:
    """Return whole groups, in order, in at most `steps` parts of about equally many
    groups.

    With fewer groups than steps there are fewer parts. Parts in which nothing is
    trained are left out.
    """
    group_ids = [sample.group_id for sample in batch.samples]
    groups = list(dict.fromkeys(group_ids))
    num_parts = min(steps, len(groups))
    part_of_group: dict[str, int] = {}
    for place, group in enumerate(groups):
        part_of_group[group] = place * num_parts // len(groups)
    indices_by_part: list[list[int]] = [[] for _ in range(num_parts)]
    for index, group in enumerate(group_ids):
        part = part_of_group[group]
        indices_by_part[part].append(index)
    parts: list[TrainBatch] = []
    for indices in indices_by_part:
        mini_batch = _select(batch, indices)
        counts = TrainedCounts.of(mini_batch.samples)
        if counts.samples:
            mini_batch = replace(mini_batch, counts=counts)
            parts.append(mini_batch)
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
    indices_by_rank = balance(batch, ranks, cost)
    return [_select(batch, indices) for indices in indices_by_rank]
