"""From a batch to each rank's shard: mini-batches first, then their samples over the ranks by cost.

Invariant: what a mini-batch holds, and its loss denominator, do not depend on the number of ranks. A rank
here is a data-parallel replica: all ranks that hold one copy of the model work on the same shard. Pure numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from invrl.train.micro_batch import Row, rows_of
from invrl.train.model_size import UNKNOWN_MODEL, ComputeCost
from invrl.train.packing import common_prefix, token_order_key
from invrl.types import TrainBatch

_GOOD_BALANCE = 1.01
"""Work of the slowest rank over the mean at which no further group is split."""
_VAIN_SPLITS = 32
"""The search ends after this many splits in a row without a better balance."""

Shard = tuple[TrainBatch, ...]
"""One rank's work: its share of each mini-batch, in order; each mini-batch is one optimizer step. The share's
`total_tokens` is that of the whole mini-batch over all ranks: the loss denominator."""


def shard_batch(
    batch: TrainBatch, *, ranks: int, steps: int, cost: ComputeCost = UNKNOWN_MODEL
) -> list[Shard]:
    """One shard per data-parallel rank, of at most `steps` mini-batches. `cost`: of the model's forward
    pass."""
    shares_by_step = [_split_over_ranks(mini_batch, ranks, cost) for mini_batch in mini_batches(batch, steps)]
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Rollouts of one group that stay on one rank."""

    rollouts: tuple[tuple[int, ...], ...]
    """Indices of each rollout's samples."""
    work: float


def _split_over_ranks(batch: TrainBatch, ranks: int, cost: ComputeCost) -> list[TrainBatch]:
    """One share per rank, balanced by estimated work.

    Rows of a group share their prompt, and each part of a group computes the prompt again. So groups begin
    whole, and while the balance is not good the costliest part on the slowest rank is split in two. The
    rows of one rollout stay together.
    """
    if ranks == 1:
        return [batch]
    estimate = _WorkEstimate(batch, cost)
    parts = [_Part(rollouts, estimate.of(rollouts)) for rollouts in _groups(batch)]
    best: list[list[_Part]] = []
    least = float("inf")
    vain_splits = 0
    while vain_splits <= _VAIN_SPLITS:
        by_rank = _largest_first(parts, ranks)
        work_by_rank = [sum(part.work for part in rank_parts) for rank_parts in by_rank]
        slowest = max(work_by_rank)
        if slowest < least:
            best = by_rank
            least = slowest
            vain_splits = 0
        if slowest <= _GOOD_BALANCE * sum(work_by_rank) / ranks:
            break
        part = _costliest_divisible(by_rank[work_by_rank.index(slowest)]) or _costliest_divisible(parts)
        if part is None:
            break
        parts.remove(part)
        middle = len(part.rollouts) // 2
        for half in (part.rollouts[:middle], part.rollouts[middle:]):
            parts.append(_Part(half, estimate.of(half)))
        vain_splits += 1
    shares: list[TrainBatch] = []
    for rank_parts in best:
        indices = [index for part in rank_parts for rollout in part.rollouts for index in rollout]
        shares.append(_select(batch, sorted(indices)))
    return shares


def _costliest_divisible(parts: Sequence[_Part]) -> _Part | None:
    divisible = [part for part in parts if len(part.rollouts) > 1]
    return max(divisible, key=lambda part: part.work, default=None)


def _groups(batch: TrainBatch) -> list[tuple[tuple[int, ...], ...]]:
    """For each group the indices of each rollout's samples."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, sample in enumerate(batch.samples):
        rollouts = groups.setdefault(sample.group_id, {})
        rollouts.setdefault(sample.rollout_id, []).append(index)
    return [tuple(tuple(indices) for indices in rollouts.values()) for rollouts in groups.values()]


def _largest_first(parts: Sequence[_Part], ranks: int) -> list[list[_Part]]:
    """Gives the costliest part left to the least loaded rank, until none is left."""
    by_rank: list[list[_Part]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for part in sorted(parts, key=lambda part: -part.work):
        load, rank = loads[0]
        by_rank[rank].append(part)
        heapreplace(loads, (load + part.work, rank))
    return by_rank


class _WorkEstimate:
    """The work of computing samples together: a prefix that they share counts once. A prefix that all rows of
    the batch share is left out: every rank computes it, however the rows are split."""

    def __init__(self, batch: TrainBatch, cost: ComputeCost) -> None:
        self._cost = cost
        self._rows: list[Row] = rows_of(batch.samples)
        keys = [token_order_key(row.tokens_T) for row in self._rows]
        computed = [index for index, row in enumerate(self._rows) if row.num_computed]
        computed.sort(key=keys.__getitem__)
        self._order = {index: place for place, index in enumerate(computed)}
        """Row -> its place among the rows that are computed, sorted by tokens."""
        self._num_common = 0
        if computed:
            self._num_common = common_prefix(self._tokens(computed[0]), self._tokens(computed[-1]))

    def of(self, rollouts: Sequence[Sequence[int]]) -> float:
        indices = [index for rollout in rollouts for index in rollout if index in self._order]
        indices.sort(key=self._order.__getitem__)
        work = 0.0
        previous_T = np.empty(0, np.int32)
        for index in indices:
            tokens_T = self._tokens(index)
            start = max(self._num_common, common_prefix(previous_T, tokens_T))
            num_projected = int(np.count_nonzero(self._rows[index].wanted_N > start))
            work += self._cost.tokens(start, len(tokens_T)) + num_projected * self._cost.projection
            previous_T = tokens_T
        return work

    def _tokens(self, index: int) -> np.ndarray:
        """The row's computed tokens."""
        row = self._rows[index]
        return row.tokens_T[: row.num_computed]
