"""Context parallelism: which tokens of a micro-batch each rank computes, and what their
queries see.

Every attention block is cut into twice as many pieces as there are ranks, and each rank
takes one from either end: later queries see more keys, so that first and last together
cost as much as two in the middle (zigzag, Megatron's order too). Before attention the
ranks gather the keys and values of all tokens. So prefix trees and windows stay
unchanged, and rows of any length work. Pure numpy.

Axes: P tokens of the micro-batch, Q those of this rank, U rows of logits, N wanted
tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextShare:
    """One rank's share of a micro-batch, which is padded so that all ranks have equally
    many tokens."""

    micro_batch: MicroBatch
    """Whole micro-batch, with the padding."""
    places_Q: NDArray[np.int64]
    """Places of this rank's tokens, ascending."""
    gathered_P: NDArray[np.int64] | None
    """Index of each token among the gathered ones, rank by rank. None: one rank has all
    tokens."""

    @staticmethod
    def of(
        micro_batch: MicroBatch, *, rank: int, ranks: int, multiple: int
    ) -> "ContextShare":
        """Return a rank's share. Each rank's number of tokens becomes a multiple of
        `multiple` (`device.tokens_multiple`)."""
        owner_P = _owners(micro_batch.blocks, ranks)
        num_owned = np.bincount(owner_P, minlength=ranks)
        size = -(-int(num_owned.max()) // multiple) * multiple
        padding = np.repeat(np.arange(ranks), size - num_owned)
        micro_batch = micro_batch.padded_to(ranks * size)
        if ranks == 1:
            return ContextShare(
                micro_batch=micro_batch, places_Q=np.arange(size), gathered_P=None
            )
        order = np.argsort(np.concatenate([owner_P, padding]), kind="stable")
        gathered_P = np.empty(ranks * size, np.int64)
        gathered_P[order] = np.arange(ranks * size)
        own = slice(rank * size, (rank + 1) * size)
        return ContextShare(
            micro_batch=micro_batch, places_Q=order[own], gathered_P=gathered_P
        )

    @property
    def tokens_Q(self) -> NDArray[np.int64]:
        return self.micro_batch.tokens_P[self.places_Q]

    @property
    def positions_Q(self) -> NDArray[np.int64]:
        return self.micro_batch.positions_P[self.places_Q]

    @property
    def sequences_Q(self) -> NDArray[np.int64]:
        return self.micro_batch.sequences_P[self.places_Q]

    def own_blocks(self, blocks: Sequence[AttentionBlock]) -> Sequence[AttentionBlock]:
        """Return the attention of this rank's queries, in their order. Places are those
        in the whole micro-batch."""
        if self.gathered_P is None:
            return blocks
        return [own for block in blocks for own in self._own_parts(block)]

    def _own_parts(self, block: AttentionBlock) -> Iterator[AttentionBlock]:
        first, last = np.searchsorted(self.places_Q, (block.start, block.end))
        places = self.places_Q[first:last]
        gaps = np.flatnonzero(np.diff(places) != 1) + 1
        for run in np.split(places, gaps):
            if len(run):
                yield _queries(block, int(run[0]), int(run[-1]) + 1)

    def own_projections(self) -> tuple[MicroBatch, NDArray[np.bool_]]:
        """Return the micro-batch with only the rows of logits of this rank's tokens,
        and which of the wanted tokens [N] these predict."""
        micro_batch = self.micro_batch
        if self.gathered_P is None:
            is_own_N = np.ones(len(micro_batch.targets_N), np.bool_)
            return micro_batch, is_own_N
        is_own_U = np.isin(micro_batch.project_U, self.places_Q)
        is_own_N = is_own_U[micro_batch.projection_N]
        return micro_batch.with_projections(is_own_U), is_own_N

    def own_indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of each of these places among this rank's tokens. All must
        be its own."""
        return np.searchsorted(self.places_Q, places)


def _owners(blocks: Sequence[AttentionBlock], ranks: int) -> NDArray[np.int64]:
    """Return the rank of each token [P]. Blocks tile the packed tokens."""
    num_pieces = 2 * ranks
    owners: list[NDArray[np.int64]] = []
    for block in blocks:
        num_queries = block.end - block.start
        piece = np.arange(num_queries) * num_pieces // num_queries
        from_the_end = num_pieces - 1 - piece
        owners.append(np.minimum(piece, from_the_end))
    return np.concatenate(owners)


def _queries(block: AttentionBlock, start: int, end: int) -> AttentionBlock:
    """Return the queries [start, end) of a block alone."""
    before_K = np.arange(block.start, start)
    prefix_K = np.concatenate([block.prefix_K, before_K])
    mask_QK = None
    if block.mask_QK is not None:
        queries = slice(start - block.start, end - block.start)
        num_keys = len(prefix_K) + end - start
        mask_QK = block.mask_QK[queries, :num_keys]
    return AttentionBlock(start=start, end=end, prefix_K=prefix_K, mask_QK=mask_QK)
