"""Attention calls of layers in which a token attends only to the last tokens before it.

Pure numpy. A window counts positions, so it is the same for a row in a prefix tree as
for that row alone.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.train.batches.micro_batch import AttentionBlock

QUERY_CHUNK = 1024
"""Maximum number of queries of one call: bounds its mask, and the keys that only some
of its queries see."""


def windowed(
    blocks: Sequence[AttentionBlock], positions_P: NDArray[np.int64], window: int
) -> list[AttentionBlock]:
    """Limit attention to keys less than `window` positions before the query.

    A block without a query that could see further stays unchanged.
    """
    limited: list[AttentionBlock] = []
    for block in blocks:
        if positions_P[block.start : block.end].max() < window:
            limited.append(block)
        else:
            limited += _chunks(block, positions_P, window)
    return limited


def _chunks(
    block: AttentionBlock, positions_P: NDArray[np.int64], window: int
) -> Iterator[AttentionBlock]:
    for start in range(block.start, block.end, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, block.end)
        yield _chunk(block, positions_P, window, start, end)


def _chunk(
    block: AttentionBlock,
    positions_P: NDArray[np.int64],
    window: int,
    start: int,
    end: int,
) -> AttentionBlock:
    """Return the queries [start, end) of the block, without the keys that are too far
    from all of them."""
    own_K = np.arange(block.start, end)
    keys_K = np.concatenate([block.prefix_K, own_K])
    queries_Q = np.arange(start, end)
    is_own_K = keys_K >= start
    is_near_K = positions_P[keys_K] > positions_P[queries_Q].min() - window
    columns_K = np.flatnonzero(is_own_K | is_near_K)
    keys_K = keys_K[columns_K]
    if block.mask_QK is None:
        mask_QK = keys_K[None, :] <= queries_Q[:, None]
    else:
        mask_QK = block.mask_QK[queries_Q - block.start][:, columns_K]
    distance_QK = positions_P[queries_Q][:, None] - positions_P[keys_K][None, :]
    return AttentionBlock(
        start=start,
        end=end,
        prefix_K=keys_K[keys_K < start],
        mask_QK=mask_QK & (distance_QK < window),
    )
