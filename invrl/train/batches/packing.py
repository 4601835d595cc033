"""Packing: sequences become micro-batches in which a shared prefix is computed once.

When sequences are sorted by their tokens, sequences that share a prefix are neighbours.
One pass over the sorted sequences of a micro-batch therefore lays out a prefix trie:
each sequence adds only the tokens after its longest common prefix with the previous
sequence. The sequences that share their first token form a tree, and a token attends
only to its own ancestors, at its own depth, so the result is the same as for each
sequence alone. The last trained token of a sequence is only predicted; neither it nor
the tokens after it are computed at all.

`bin_packing.py` decides which sequences come together. Memory follows the number of
packed tokens, which is bounded. One row of logits serves every trained token that comes
after the same tokens at the same temperature. Pure numpy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.train.batches.bin_packing import balance_bins, pack_into_bins
from invrl.train.batches.micro_batch import (
    EMPTY_MICRO_BATCH,
    UNKNOWN_EXPERT,
    AttentionBlock,
    MicroBatch,
    TokenSequence,
)
from invrl.train.cost.model_size import UNKNOWN_MODEL, ComputeCost
from invrl.types.top_logprobs import NO_TOKEN

DENSE_TREE_TOKENS = 256
"""Largest branching tree that is one attention call under a mask of tokens^2. A larger
tree is one block per branch, over the branch's ancestors and the branch itself."""


def pack(
    sequences: Sequence[TokenSequence],
    *,
    max_tokens: int,
    share_prefixes: bool,
    cost: ComputeCost = UNKNOWN_MODEL,
) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most `max_tokens` packed tokens, as few
    as `pack_into_bins` finds, and evened by their cost. `cost` is of the model's
    forward pass.

    A sequence that needs more stands alone. Sequences without a wanted token are left
    out. There is at least one micro-batch: a rank without data takes part in the step
    with an empty one. The result depends only on the arguments, so ranks with the same
    sequences make the same micro-batches."""
    order = [index for index, sequence in enumerate(sequences) if sequence.num_computed]
    num_shared = [0] * len(order)
    if share_prefixes:
        order.sort(key=lambda index: token_order_key(sequences[index].tokens_T))
        computed = [
            sequences[index].tokens_T[: sequences[index].num_computed]
            for index in order
        ]
        for place in range(1, len(order)):
            num_shared[place] = common_prefix(computed[place - 1], computed[place])
    lengths = [sequences[index].num_computed for index in order]

    def work(place: int, start: int) -> float:
        sequence = sequences[order[place]]
        num_projected = int(np.count_nonzero(sequence.wanted_N > start))
        return (
            cost.tokens(start, sequence.num_computed) + num_projected * cost.projection
        )

    bins = pack_into_bins(lengths, num_shared, capacity=max_tokens)
    micro_batches: list[MicroBatch] = []
    for places in balance_bins(
        bins, lengths, num_shared, capacity=max_tokens, work=work
    ):
        layout = _Layout(share_prefixes)
        for place in places:
            layout.add(order[place], sequences[order[place]])
        micro_batches.append(layout.micro_batch())
    return micro_batches or [EMPTY_MICRO_BATCH]


def token_order_key(tokens_T: NDArray[np.int32]) -> bytes:
    """Return a sort key that orders sequences by their tokens: ids are not negative, so
    byte order is token order."""
    return tokens_T.astype(">u4").tobytes()


def common_prefix(a_T: NDArray[np.integer], b_T: NDArray[np.integer]) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(a_T), len(b_T))
    if length == 0:
        return 0
    differs_T = a_T[:length] != b_T[:length]
    first = int(differs_T.argmax())
    if differs_T[first]:
        return first
    return length


@dataclass(frozen=True, slots=True)
class _Branch:
    """A run of packed tokens [start, end), and the places of its ancestors."""

    start: int
    end: int
    ancestors_K: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _PlacedSequence:
    """A sequence in the layout."""

    index: int
    """Index of the sequence among those to pack."""
    sequence: TokenSequence
    num_shared: int
    """Length of the prefix that the sequence shares with the previous one."""
    places_T: NDArray[np.int64]
    """Places of the sequence's computed tokens: those of the shared prefix, then new
    ones."""


class _Layout:
    """A micro-batch under construction. With shared prefixes its sequences are added in
    sorted order."""

    def __init__(self, share_prefixes: bool) -> None:
        self._num_tokens = 0
        self._share_prefixes = share_prefixes
        self._trees: list[list[_Branch]] = []
        self._last_tokens_T = np.empty(0, np.int32)
        self._last_places_T = np.empty(0, np.int64)
        self._sequences: list[_PlacedSequence] = []
        self._ended: list[tuple[NDArray[np.int64], int]] = []
        """(places of tokens that get no more descendants, the place after the last
        one)."""

    def add(self, index: int, sequence: TokenSequence) -> None:
        """Lay out the next sequence."""
        tokens_T = sequence.tokens_T[: sequence.num_computed]
        num_shared = 0
        if self._share_prefixes:
            num_shared = common_prefix(self._last_tokens_T, tokens_T)
        start = self._num_tokens
        end = start + len(tokens_T) - num_shared
        places_T = np.concatenate(
            [self._last_places_T[:num_shared], np.arange(start, end)]
        )
        self._sequences.append(_PlacedSequence(index, sequence, num_shared, places_T))
        if end > start:
            if num_shared == 0:
                self._trees.append([])
            self._ended.append((self._last_places_T[num_shared:], start))
            self._trees[-1].append(_Branch(start, end, places_T[:num_shared]))
            self._last_tokens_T = tokens_T
            self._last_places_T = places_T
            self._num_tokens = end

    def micro_batch(self) -> MicroBatch:
        """Return the finished micro-batch."""
        sequences = [placed.sequence for placed in self._sequences]
        num_wanted = [len(sequence.wanted_N) for sequence in sequences]
        tokens: list[NDArray[np.int32]] = []
        positions: list[NDArray[np.int64]] = []
        predict_from: list[NDArray[np.int64]] = []
        for placed in self._sequences:
            sequence = placed.sequence
            tokens.append(sequence.tokens_T[placed.num_shared : sequence.num_computed])
            positions.append(np.arange(placed.num_shared, sequence.num_computed))
            predict_from.append(placed.places_T[sequence.wanted_N - 1])
        predict_from_N = np.concatenate(predict_from)
        temperatures = np.array(
            [sequence.temperature for sequence in sequences], np.float32
        )
        distinct, number_by_sequence = np.unique(temperatures, return_inverse=True)
        temperature_number_N = number_by_sequence.astype(np.int64).repeat(num_wanted)
        masks, mask_number_N = _numbered_masks(sequences)
        # Wanted tokens of one key share a row of logits. Rows of logits are in the
        # order of the keys: by place, then by temperature, then by mask.
        key_N = (predict_from_N * len(distinct) + temperature_number_N) * len(
            masks
        ) + mask_number_N
        _, first_U, projection_N = np.unique(
            key_N, return_index=True, return_inverse=True
        )
        restricted: list[int] = []
        allowed: list[NDArray[np.uint8]] = []
        if masks != [None]:
            for row_of_logits, mask_number in enumerate(
                mask_number_N[first_U].tolist()
            ):
                mask = masks[mask_number]
                if mask is not None:
                    restricted.append(row_of_logits)
                    allowed.append(np.frombuffer(mask, np.uint8))
        return MicroBatch(
            tokens_P=np.concatenate(tokens, dtype=np.int64),
            positions_P=np.concatenate(positions),
            ends_P=self._ends(),
            sequences_P=np.bincount(
                np.concatenate([placed.places_T for placed in self._sequences])
            ),
            blocks=tuple(
                block for tree in self._trees for block in _attention_blocks(tree)
            ),
            project_U=predict_from_N[first_U],
            temperature_U=temperatures.repeat(num_wanted)[first_U],
            restricted_M=np.array(restricted, np.int64),
            allowed_MW=np.array(allowed, np.uint8),
            projection_N=projection_N,
            targets_N=np.concatenate(
                [sequence.tokens_T[sequence.wanted_N] for sequence in sequences],
                dtype=np.int64,
            ),
            sequences=tuple(
                (placed.index, placed.sequence.wanted_N) for placed in self._sequences
            ),
            experts_PLK=self._experts(),
            candidates_NK=_candidates(sequences),
        )

    def _ends(self) -> NDArray[np.int64]:
        """Return `ends_P`. Sequences are laid out depth first, so the descendants of a
        token are the tokens after it until a sequence leaves its path."""
        ends_P = np.full(self._num_tokens, self._num_tokens)
        for places, end in self._ended:
            ends_P[places] = end
        return ends_P

    def _experts(self) -> NDArray[np.int16] | None:
        """Return the experts of the packed tokens. Sequences that share a prefix were
        computed separately in the engine, perhaps by other experts. The first sequence
        that knows a token's experts decides."""
        experts_PLK = None
        for placed in reversed(self._sequences):
            experts_TLK = placed.sequence.experts_TLK
            if experts_TLK is None:
                continue
            if experts_PLK is None:
                experts_PLK = np.full(
                    (self._num_tokens, *experts_TLK.shape[1:]), UNKNOWN_EXPERT, np.int16
                )
            computed_TLK = experts_TLK[: placed.sequence.num_computed]
            known_T = computed_TLK[:, 0, 0] != UNKNOWN_EXPERT
            experts_PLK[placed.places_T[known_T]] = computed_TLK[known_T]
        return experts_PLK


def _candidates(sequences: Sequence[TokenSequence]) -> NDArray[np.int64] | None:
    """Return the candidates of all wanted tokens; `NO_TOKEN` for the tokens of
    sequences without."""
    widths = [
        sequence.candidates_NK.shape[1]
        for sequence in sequences
        if sequence.candidates_NK is not None
    ]
    if not widths:
        return None
    candidates_NK = np.full(
        (sum(len(sequence.wanted_N) for sequence in sequences), max(widths)),
        NO_TOKEN,
        np.int64,
    )
    start = 0
    for sequence in sequences:
        end = start + len(sequence.wanted_N)
        if sequence.candidates_NK is not None:
            candidates_NK[start:end, : sequence.candidates_NK.shape[1]] = (
                sequence.candidates_NK
            )
        start = end
    return candidates_NK


def _numbered_masks(
    sequences: Sequence[TokenSequence],
) -> tuple[list[bytes | None], NDArray[np.int64]]:
    """Return the distinct masks of the wanted tokens, and for each wanted token [N] the
    number of its mask."""
    numbers: dict[bytes | None, int] = {}
    numbers_by_sequence: list[NDArray[np.int64]] = []
    for sequence in sequences:
        if sequence.allowed_N:
            sequence_numbers = [
                numbers.setdefault(allowed, len(numbers))
                for allowed in sequence.allowed_N
            ]
            numbers_by_sequence.append(np.array(sequence_numbers, np.int64))
        else:
            number = numbers.setdefault(None, len(numbers))
            numbers_by_sequence.append(
                np.full(len(sequence.wanted_N), number, np.int64)
            )
    return list(numbers), np.concatenate(numbers_by_sequence)


def _attention_blocks(tree: list[_Branch]) -> list[AttentionBlock]:
    """Return the attention of one tree."""
    start = tree[0].start
    end = tree[-1].end
    if len(tree) > 1 and end - start <= DENSE_TREE_TOKENS:
        return [_dense_block(tree, start, end)]
    return [
        AttentionBlock(
            start=branch.start,
            end=branch.end,
            prefix_K=branch.ancestors_K,
            mask_QK=None,
        )
        for branch in tree
    ]


def _dense_block(tree: list[_Branch], start: int, end: int) -> AttentionBlock:
    """Return a whole tree under one mask: each token sees its ancestors, and its own
    branch causally."""
    mask_QK = np.zeros((end - start, end - start), np.bool_)
    for branch in tree:
        queries = slice(branch.start - start, branch.end - start)
        mask_QK[queries, branch.ancestors_K - start] = True
        mask_QK[queries, queries] = np.tri(branch.end - branch.start, dtype=np.bool_)
    return AttentionBlock(
        start=start, end=end, prefix_K=np.empty(0, np.int64), mask_QK=mask_QK
    )
