"""From a batch to each rank's shard: mini-batches first, then their samples over the ranks by cost.

Invariant: what a mini-batch holds, and its loss denominator, do not depend on the number of ranks. A rank
here is a data-parallel replica: all ranks that hold one copy of the model work on the same shard. Pure numpy.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from invrl.train.micro_batch import rows_of
from invrl.train.packing import common_prefix, token_order_key
from invrl.types import TrainBatch

ATTENTION_TOKENS = 4096
"""Context length at which a token's attention costs as much as the rest of the model. For balance only."""
_GROUP_PARTS = (1, 2, 4, 8)
"""Into how many parts a group may be split over several ranks."""

Shard = tuple[TrainBatch, ...]
"""One rank's work: its share of each mini-batch, in order; each mini-batch is one optimizer step. The share's
`total_tokens` is that of the whole mini-batch over all ranks: the loss denominator."""


def shard_batch(batch: TrainBatch, *, ranks: int, steps: int) -> list[Shard]:
    """One shard per rank, of at most `steps` mini-batches."""
    shares_by_step = [_split_over_ranks(mini_batch, ranks) for mini_batch in mini_batches(batch, steps)]
    return [tuple(shares[rank] for shares in shares_by_step) for rank in range(ranks)]


def mini_batches(batch: TrainBatch, steps: int) -> list[TrainBatch]:
    """Whole groups, in order, in at most `steps` parts of about equally many groups.

    With fewer groups than steps there are fewer parts. Parts in which nothing is trained are left out.
    """
    groups = list(dict.fromkeys(sample.group_id for sample in batch.samples))
    num_parts = min(steps, len(groups))
    part_of_group = {group: index * num_parts // len(groups) for index, group in enumerate(groups)}
    indices_by_part: list[list[int]] = [[] for _ in range(num_parts)]
    for index, sample in enumerate(batch.samples):
        indices_by_part[part_of_group[sample.group_id]].append(index)
    parts: list[TrainBatch] = []
    for indices in indices_by_part:
        part = _select(batch, indices)
        num_trained = sum(int(sample.loss_mask_T.sum()) for sample in part.samples)
        if num_trained:
            parts.append(replace(part, total_tokens=num_trained))
    return parts


def _select(batch: TrainBatch, indices: Sequence[int]) -> TrainBatch:
    """These samples; `total_tokens` stays that of the whole batch."""
    samples = tuple(batch.samples[index] for index in indices)
    advantages = tuple(batch.advantages[index] for index in indices)
    return replace(batch, samples=samples, advantages=advantages)


def _split_over_ranks(batch: TrainBatch, ranks: int) -> list[TrainBatch]:
    """One share per rank, balanced by cost.

    Groups stay whole where that balances as well as splitting them: rows of a group share their prompt, and
    each part of a group would compute the prompt again.
    """
    if ranks == 1:
        assignments = [_assign(batch, ranks, parts_per_group=1)]
    else:
        assignments = [_assign(batch, ranks, parts_per_group=parts) for parts in _GROUP_PARTS]

    def largest_cost(indices_by_rank: list[list[int]]) -> float:
        return max(_cost(batch, indices) for indices in indices_by_rank)

    best = min(assignments, key=largest_cost)
    return [_select(batch, indices) for indices in best]


def _assign(batch: TrainBatch, ranks: int, *, parts_per_group: int) -> list[list[int]]:
    """Indices of samples by rank.

    Splits each group's rollouts into parts, then gives the costliest part left to the least loaded rank. The
    rows of one rollout stay together.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for index, sample in enumerate(batch.samples):
        rollouts = groups.setdefault(sample.group_id, {})
        rollouts.setdefault(sample.rollout_id, []).append(index)
    parts: list[list[int]] = []
    for rollouts in groups.values():
        rows_by_rollout = list(rollouts.values())
        size = -(-len(rows_by_rollout) // parts_per_group)  # rounded up
        for start in range(0, len(rows_by_rollout), size):
            parts.append(list(chain(*rows_by_rollout[start : start + size])))
    costs = [_cost(batch, part) for part in parts]
    costliest_first = sorted(range(len(parts)), key=lambda index: -costs[index])
    indices_by_rank: list[list[int]] = [[] for _ in range(ranks)]
    cost_by_rank = [0.0] * ranks
    for part_index in costliest_first:
        rank = cost_by_rank.index(min(cost_by_rank))
        indices_by_rank[rank] += parts[part_index]
        cost_by_rank[rank] += costs[part_index]
    return [sorted(indices) for indices in indices_by_rank]


def _cost(batch: TrainBatch, indices: Sequence[int]) -> float:
    """The work of computing these samples together, in tokens: shared prefixes count once, attention by the
    depth of its queries."""
    rows = [row for row in rows_of(batch.samples[index] for index in indices) if row.num_computed]
    rows.sort(key=lambda row: token_order_key(row.tokens_T))
    cost = 0.0
    previous_T = np.empty(0, np.int32)
    for row in rows:
        tokens_T = row.tokens_T[: row.num_computed]
        num_tokens = len(tokens_T)
        num_shared = common_prefix(previous_T, tokens_T)
        mean_depth = (num_tokens + num_shared) / 2
        cost += (num_tokens - num_shared) * (1 + mean_depth / ATTENTION_TOKENS)
        previous_T = tokens_T
    return cost
