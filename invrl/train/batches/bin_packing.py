"""Packs sequences into bins with a limited number of tokens, in which a shared prefix
counts once.

Sequences sorted by their tokens are the leaves of a tree: those that share the first d
tokens are neighbours and form a subtree at depth d. The tree is climbed from its
leaves. At each subtree, bundles of sequences that its children could not fill are
combined, largest first, each into the bundle that it fills best (best fit decreasing).
Two bundles that meet at depth d share d tokens. So sequences are first combined with
those that they share most with, and a subtree is split only if it is larger than a bin.

This gives few bins, but the last ones may be nearly empty. `balance_bins` then spreads
their subtrees so that the bins take equally long. Pure.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class _Bundle:
    """Sequences that will be in one bin."""

    num_tokens: int
    """Distinct tokens of the sequences, from their beginnings."""
    sequences: list[int]


@dataclass(slots=True)
class _Subtree:
    """Sequences that share their first `depth` tokens, while they are collected."""

    depth: int
    bundles: list[_Bundle] = field(default_factory=list)


def pack_into_bins(
    lengths: Sequence[int], num_shared: Sequence[int], *, capacity: int
) -> list[list[int]]:
    """Return the sequences of each bin, ascending; bins in the order of their first
    sequences.

    `lengths` are the sequences' tokens, in sorted order. `num_shared` is, for each
    sequence, the length of the prefix that it shares with the previous sequence; 0 for
    the first. A sequence longer than `capacity` gets a separate bin."""
    open_subtrees = [_Subtree(depth=0)]  # each within the one before it
    for sequence, length in enumerate(lengths):
        depth = num_shared[sequence]
        # The sequence before this one may share more with its own neighbours than with this
        # sequence: those subtrees have ended. Its bundle then meets this sequence's at `depth`.
        ended = []
        while open_subtrees[-1].depth > depth:
            subtree = open_subtrees.pop()
            subtree.bundles += ended
            ended = _combined(subtree, capacity)
        if open_subtrees[-1].depth < depth:
            neighbours: list[_Bundle] = []
            if not ended:  # the sequence before this one is alone at its depth
                neighbours.append(open_subtrees[-1].bundles.pop())
            open_subtrees.append(_Subtree(depth=depth, bundles=neighbours))
        open_subtrees[-1].bundles += ended
        open_subtrees[-1].bundles.append(_Bundle(length, [sequence]))
    ended = []
    while open_subtrees:
        subtree = open_subtrees.pop()
        subtree.bundles += ended
        ended = _combined(subtree, capacity)
    return sorted(sorted(bundle.sequences) for bundle in ended)


def _combined(subtree: _Subtree, capacity: int) -> list[_Bundle]:
    """Combine the subtree's bundles as far as they fit."""
    if len(subtree.bundles) == 1:
        return subtree.bundles
    depth = subtree.depth
    combined: list[_Bundle] = []
    free: list[tuple[int, int]] = []
    """Tokens that still fit into a combined bundle, and its index; ascending."""
    for bundle in sorted(subtree.bundles, key=lambda bundle: -bundle.num_tokens):
        needed = bundle.num_tokens - depth
        place = bisect_left(free, (needed, 0))
        if place == len(free):
            index = len(combined)
            combined.append(bundle)
        else:
            _, index = free.pop(place)
            combined[index].num_tokens += needed
            combined[index].sequences += bundle.sequences
        insort(free, (capacity - combined[index].num_tokens, index))
    return combined


@dataclass(slots=True)
class _Unit:
    """Sequences of one bin that share more than all sequences of all bins do. They stay
    together."""

    sequences: list[int]
    num_tokens: int
    """Distinct tokens, without those that all sequences of all bins share."""
    work: float


def balance_bins(
    bins: Sequence[list[int]],
    lengths: Sequence[int],
    num_shared: Sequence[int],
    *,
    capacity: int,
    work: Callable[[int, int], float],
) -> list[list[int]]:
    """Return as many bins of about equal work, or the given ones if the units do not
    fit that way.

    `bins`, `lengths`, `num_shared` and `capacity` are those of `pack_into_bins`. `work`
    is that of a sequence (by its position) after a number of its tokens. The costliest
    remaining unit goes into the bin with the least work that has room for it."""
    if len(bins) < 2:
        return list(bins)
    common = min(num_shared[1:])
    units_by_bin = [
        _units(sequences, lengths, num_shared, common, work) for sequences in bins
    ]
    units = sorted(
        (unit for bin_units in units_by_bin for unit in bin_units),
        key=lambda unit: -unit.work,
    )
    work_B = np.zeros(len(bins))
    tokens_B = np.zeros(len(bins), np.int64)
    even: list[list[int]] = [[] for _ in bins]
    for unit in units:
        has_room_B = (tokens_B + unit.num_tokens <= capacity - common) | (tokens_B == 0)
        if not has_room_B.any():
            return list(bins)
        place = int(np.where(has_room_B, work_B, np.inf).argmin())
        work_B[place] += unit.work
        tokens_B[place] += unit.num_tokens
        even[place] += unit.sequences
    given = max(sum(unit.work for unit in bin_units) for bin_units in units_by_bin)
    if work_B.max() >= given:
        return list(bins)
    return sorted(sorted(sequences) for sequences in even)


def _units(
    sequences: Sequence[int],
    lengths: Sequence[int],
    num_shared: Sequence[int],
    common: int,
    work: Callable[[int, int], float],
) -> list[_Unit]:
    """Return the units of a bin, whose sequences ascend."""
    units: list[_Unit] = []
    for index, sequence in enumerate(sequences):
        start = common
        if index:
            start = min(num_shared[sequences[index - 1] + 1 : sequence + 1])
        if index == 0 or start == common:
            units.append(_Unit([], 0, 0.0))
        unit = units[-1]
        unit.sequences.append(sequence)
        unit.num_tokens += lengths[sequence] - start
        unit.work += work(sequence, start)
    return units
