"""Balance of a mini-batch over ranks: each rank computes some of its rollouts, by
estimated work.

Sequences of a group share their prompt, and each part of a group computes the prompt
again. So groups begin whole and are split while that makes the slowest rank faster: the
costliest part on the slowest rank into two. From the best of these splits the slowest
rank gives single rollouts away or exchanges them, and the split whose slowest rank is
then fastest is taken: the best one before the exchanges is often not the best one after
them. The sequences of one rollout stay together. Pure numpy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

import numpy as np

from invrl.train.batches.micro_batch import TokenSequence, token_sequences
from invrl.train.batches.packing import common_prefix, token_order_key
from invrl.train.cost.model_size import ComputeCost
from invrl.types.batches import TrainBatch

_GOOD_BALANCE = 1.005
"""Ratio of the slowest rank's work to the least possible at which the search ends."""
_VAIN_SPLITS = 32
"""Number of splits in a row without a better balance after which splitting ends."""
_STARTS = 16
"""Number of splits that rollouts are exchanged from."""
_MOST_EXCHANGES = 200

Rollouts = tuple[tuple[int, ...], ...]
"""Indices of each rollout's samples."""


def balance(batch: TrainBatch, ranks: int, cost: ComputeCost) -> list[list[int]]:
    """Return the samples of each rank, ascending. `cost` is of the model's forward
    pass."""
    estimate = _WorkEstimate(batch, cost)
    groups = _groups(batch)
    good_work = _GOOD_BALANCE * _least_work(groups, ranks, estimate)
    best: list[_Load] = []
    least = float("inf")
    for parts_by_rank in _split_groups(groups, ranks, estimate, good_work)[:_STARTS]:
        loads = _loads(parts_by_rank, estimate)
        _exchange_rollouts(loads, good_work)
        slowest = max(load.work for load in loads)
        if slowest < least:
            best = loads
            least = slowest
        if slowest <= good_work:
            break
    return [load.samples() for load in best]


def _least_work(
    groups: Sequence[Rollouts], ranks: int, estimate: "_WorkEstimate"
) -> float:
    """Return a lower bound of the slowest rank's work: every prompt is computed once,
    every rollout by one rank."""
    work_by_group = [estimate.of(rollouts) for rollouts in groups]
    least = sum(work_by_group) / ranks
    for rollouts in groups:
        for rollout in rollouts:
            work = estimate.of((rollout,))
            least = max(least, work)
    return least


# ----------------------------------------------------------------- parts of groups


@dataclass(frozen=True, slots=True)
class _Part:
    """Rollouts of one group that stay on one rank."""

    group: int
    rollouts: Rollouts
    work: float


def _groups(batch: TrainBatch) -> list[Rollouts]:
    """Return, for each group, the indices of each rollout's samples."""
    groups: dict[str, dict[str, list[int]]] = {}
    for index, sample in enumerate(batch.samples):
        rollouts = groups.setdefault(sample.group_id, {})
        indices = rollouts.setdefault(sample.rollout_id, [])
        indices.append(index)
    rollouts_by_group: list[Rollouts] = []
    for rollouts in groups.values():
        samples_by_rollout = tuple(map(tuple, rollouts.values()))
        rollouts_by_group.append(samples_by_rollout)
    return rollouts_by_group


def _split_groups(
    groups: Sequence[Rollouts], ranks: int, estimate: "_WorkEstimate", good_work: float
) -> list[list[list[_Part]]]:
    """Return splits of the groups, as the parts of each rank. The one with the fastest
    slowest rank comes first. `good_work` is that of a slowest rank that needs no more
    splits."""
    parts: list[_Part] = []
    for group, rollouts in enumerate(groups):
        work = estimate.of(rollouts)
        parts.append(_Part(group, rollouts, work))
    splits: list[tuple[float, list[list[_Part]]]] = []
    least = float("inf")
    vain_splits = 0
    while vain_splits <= _VAIN_SPLITS:
        by_rank = _largest_first(parts, ranks)
        work_by_rank: list[float] = []
        for rank_parts in by_rank:
            work = sum(part.work for part in rank_parts)
            work_by_rank.append(work)
        slowest = max(work_by_rank)
        splits.append((slowest, by_rank))
        if slowest < least:
            least = slowest
            vain_splits = 0
        if slowest <= good_work:
            break
        slowest_rank = work_by_rank.index(slowest)
        part = _costliest_divisible(by_rank[slowest_rank])
        if part is None:
            part = _costliest_divisible(parts)
        if part is None:
            break
        parts.remove(part)
        middle = len(part.rollouts) // 2
        first_half = part.rollouts[:middle]
        second_half = part.rollouts[middle:]
        for half in (first_half, second_half):
            work = estimate.of(half)
            parts.append(_Part(part.group, half, work))
        vain_splits += 1
    splits.sort(key=lambda split: split[0])
    return [by_rank for _, by_rank in splits]


def _costliest_divisible(parts: Sequence[_Part]) -> _Part | None:
    divisible = [part for part in parts if len(part.rollouts) > 1]
    return max(divisible, key=lambda part: part.work, default=None)


def _largest_first(parts: Sequence[_Part], ranks: int) -> list[list[_Part]]:
    """Give the costliest remaining part to the least loaded rank, until none is
    left."""
    by_rank: list[list[_Part]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    costliest_first = sorted(parts, key=lambda part: -part.work)
    for part in costliest_first:
        load, rank = loads[0]
        by_rank[rank].append(part)
        heapreplace(loads, (load + part.work, rank))
    return by_rank


# ----------------------------------------------------------------- single rollouts


@dataclass(slots=True)
class _Load:
    """Work of a rank."""

    estimate: "_WorkEstimate"
    rollouts_by_group: dict[int, Rollouts] = field(default_factory=dict)
    work_by_group: dict[int, float] = field(default_factory=dict)

    @property
    def work(self) -> float:
        return sum(self.work_by_group.values())

    def samples(self) -> list[int]:
        """Return the samples, ascending."""
        indices: list[int] = []
        for _, rollout in self.rollouts():
            indices += rollout
        return sorted(indices)

    def rollouts(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (group, rollout)."""
        for group, rollouts in self.rollouts_by_group.items():
            for rollout in rollouts:
                yield group, rollout

    def add(self, group: int, rollouts: Rollouts) -> None:
        own = self.rollouts_by_group.get(group, ())
        self._set(group, own + rollouts)

    def remove(self, group: int, rollout: tuple[int, ...]) -> None:
        self._set(group, self._without(group, rollout))

    def more_work(self, group: int, rollout: tuple[int, ...]) -> float:
        """Return the work that the rollout would add."""
        own = self.rollouts_by_group.get(group, ())
        work_before = self.work_by_group.get(group, 0.0)
        work_with = self.estimate.of((*own, rollout))
        return work_with - work_before

    def less_work(self, group: int, rollout: tuple[int, ...]) -> float:
        """Return the work that one of its own rollouts takes."""
        others = self._without(group, rollout)
        return self.work_by_group[group] - self.estimate.of(others)

    def _without(self, group: int, rollout: tuple[int, ...]) -> Rollouts:
        rollouts = self.rollouts_by_group[group]
        return tuple(own for own in rollouts if own != rollout)

    def _set(self, group: int, rollouts: Rollouts) -> None:
        if rollouts:
            self.rollouts_by_group[group] = rollouts
            self.work_by_group[group] = self.estimate.of(rollouts)
        else:
            del self.rollouts_by_group[group]
            del self.work_by_group[group]


def _loads(
    parts_by_rank: Sequence[Sequence[_Part]], estimate: "_WorkEstimate"
) -> list[_Load]:
    loads = [_Load(estimate) for _ in parts_by_rank]
    for load, parts in zip(loads, parts_by_rank, strict=True):
        for part in parts:
            load.add(part.group, part.rollouts)
    return loads


def _exchange_rollouts(loads: list[_Load], good_work: float) -> None:
    """Let the slowest rank give a rollout to another one, perhaps for one of its, while
    that makes it faster and the other one not slower than it was. Ends when the slowest
    rank has `good_work`."""
    for _ in range(_MOST_EXCHANGES):
        loads.sort(key=lambda load: load.work)
        slowest = loads[-1]
        if slowest.work <= good_work:
            return
        others = loads[:-1]
        if not any(_exchange(slowest, other) for other in others):
            return


def _exchange(slow: _Load, fast: _Load) -> bool:
    """Make the best exchange between the two ranks; False if none makes the slower one
    of them faster."""
    given = list(slow.rollouts())
    taken = list(fast.rollouts())
    work = max(slow.work, fast.work)
    less_slow_I = np.array([slow.less_work(*rollout) for rollout in given])
    more_fast_I = np.array([fast.more_work(*rollout) for rollout in given])
    less_fast = [fast.less_work(*rollout) for rollout in taken]
    more_slow = [slow.more_work(*rollout) for rollout in taken]
    # The last sequence of J: nothing is taken.
    less_fast_J = np.array([*less_fast, 0.0])
    more_slow_J = np.array([*more_slow, 0.0])
    slow_IJ = slow.work - less_slow_I[:, None] + more_slow_J[None, :]
    fast_IJ = fast.work + more_fast_I[:, None] - less_fast_J[None, :]
    slower_IJ = np.maximum(slow_IJ, fast_IJ)
    best = int(slower_IJ.argmin())
    i, j = np.unravel_index(best, slower_IJ.shape)
    if slower_IJ[i, j] >= work:
        return False
    _move(given[i], slow, fast)
    if j < len(taken):
        _move(taken[j], fast, slow)
    if max(slow.work, fast.work) < work:
        return True
    # Two rollouts of one group share their prompt, which the sums above leave out.
    if j < len(taken):
        _move(taken[j], slow, fast)
    _move(given[i], fast, slow)
    return False


def _move(rollout: tuple[int, tuple[int, ...]], source: _Load, target: _Load) -> None:
    group, samples = rollout
    source.remove(group, samples)
    target.add(group, (samples,))


# ----------------------------------------------------------------- work


class _WorkEstimate:
    """Work of computing samples together: a shared prefix counts once. A prefix of all
    sequences of the batch is left out: every rank computes it, however the sequences
    are split."""

    def __init__(self, batch: TrainBatch, cost: ComputeCost) -> None:
        self._cost = cost
        self._sequences: list[TokenSequence] = token_sequences(batch.samples)
        keys = [token_order_key(sequence.tokens_T) for sequence in self._sequences]
        computed = [
            index
            for index, sequence in enumerate(self._sequences)
            if sequence.num_computed
        ]
        computed.sort(key=keys.__getitem__)
        self._order = {index: place for place, index in enumerate(computed)}
        """Sequence -> its position among the computed sequences, sorted by tokens."""
        self._work: dict[tuple[int, ...], float] = {}
        """Cache by the computed sequences in their order: the search repeats the same
        sequences many times."""
        self._num_common = 0
        if computed:
            first_T = self._tokens(computed[0])
            last_T = self._tokens(computed[-1])
            self._num_common = common_prefix(first_T, last_T)

    def of(self, rollouts: Sequence[Sequence[int]]) -> float:
        indices: list[int] = []
        for rollout in rollouts:
            indices += [index for index in rollout if index in self._order]
        indices.sort(key=self._order.__getitem__)
        sequences = tuple(indices)
        work = self._work.get(sequences)
        if work is None:
            work = self._of_sequences(sequences)
            self._work[sequences] = work
        return work

    def _of_sequences(self, sequences: Sequence[int]) -> float:
        """Return the work of sequences that are sorted by tokens."""
        work = 0.0
        previous_T = np.empty(0, np.int32)
        for index in sequences:
            tokens_T = self._tokens(index)
            num_shared = common_prefix(previous_T, tokens_T)
            start = max(self._num_common, num_shared)
            is_projected_N = self._sequences[index].wanted_N > start
            num_projected = int(np.count_nonzero(is_projected_N))
            layers = self._cost.tokens(start, len(tokens_T))
            projection = num_projected * self._cost.projection
            work += layers + projection
            previous_T = tokens_T
        return work

    def _tokens(self, index: int) -> np.ndarray:
        """Return the sequence's computed tokens."""
        sequence = self._sequences[index]
        return sequence.tokens_T[: sequence.num_computed]
