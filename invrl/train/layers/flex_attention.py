"""Attention over a whole packed row in one kernel: torch's FlexAttention under a block
mask.

A packed row is prefix trees in depth-first order, so the tokens that see a token are
those from its own place to the last of its descendants (`MicroBatch.ends_P`). The
kernel checks the pairs in tiles of the mask that are neither empty nor full, and skips
the empty ones. Queries and keys are padded to whole tiles, so that one compiled kernel
serves every length; a GPU's micro-batches have whole tiles already. torch computes the
backward pass on a GPU only; on a CPU `attention.py` has one SDPA call per block of the
row instead.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.train.runtime.kernels import FLEX_TILE

_WHOLE_TILES: Any = {"IS_DIVISIBLE": True}
"""Lengths are whole tiles, which the compiler cannot know for a variable length.
Without this option the kernel compares every index with the length."""
_SEES_NOTHING = -1
_SEEN_BY_NONE = 2**31 - 1

_Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether the query sees the key, by the indices of batch, head, query and key."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """Keys that the queries of a rank's tokens see."""

    mask: BlockMask

    @staticmethod
    def of(share: ContextShare, window: int | None, target: torch.device) -> "TreeMask":
        """Build the mask. `window`: a query sees keys less than this many positions
        before it; None: all of its ancestors."""
        micro_batch = share.micro_batch
        keys_K = np.arange(len(micro_batch.tokens_P))
        if share.gathered_P is not None:
            keys_K[share.gathered_P] = np.arange(len(keys_K))
        num_queries = FLEX_TILE * _num_tiles(len(share.places_Q))
        num_keys = FLEX_TILE * _num_tiles(len(keys_K))
        first_positions_Q = np.zeros_like(share.positions_Q)
        if window is not None:
            first_positions_Q = share.positions_Q - window + 1
        sees = _sees(
            place_Q=_padded_indices(share.places_Q, num_queries, _SEES_NOTHING, target),
            first_position_Q=_padded_indices(first_positions_Q, num_queries, 0, target),
            place_K=_padded_indices(keys_K, num_keys, _SEEN_BY_NONE, target),
            end_K=_padded_indices(micro_batch.ends_P[keys_K], num_keys, 0, target),
            position_K=_padded_indices(
                micro_batch.positions_P[keys_K], num_keys, 0, target
            ),
        )
        is_seen, is_full = _tiles(share, keys_K, window)
        partial_counts, partial_tiles = _tiles_by_row(is_seen & ~is_full, target)
        full_counts, full_tiles = _tiles_by_row(is_full, target)
        return TreeMask(
            BlockMask.from_kv_blocks(
                partial_counts,
                partial_tiles,
                full_counts,
                full_tiles,
                BLOCK_SIZE=FLEX_TILE,
                mask_mod=sees,
                seq_lengths=(num_queries, num_keys),
            )
        )

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
    ) -> torch.Tensor:
        """Return the output [1, heads, Q, dim] for queries of that shape; keys and
        values [1, heads, K, dim] have fewer heads. `scale` multiplies the products of
        queries and keys."""
        num_queries, num_keys = self.mask.seq_lengths
        output = _compiled_attention()(
            _padded(queries, num_queries),
            _padded(keys, num_keys),
            _padded(values, num_keys),
            self.mask,
            scale,
        )
        return output[:, :, : queries.shape[2]]


def _sees(
    *,
    place_Q: torch.Tensor,
    first_position_Q: torch.Tensor,
    place_K: torch.Tensor,
    end_K: torch.Tensor,
    position_K: torch.Tensor,
) -> _Sees:
    """Return the mask function. The window is also in a tensor: torch recompiles for
    every other number."""

    def sees(
        _batch: torch.Tensor,
        _head: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
    ) -> torch.Tensor:
        is_before = place_K[key] <= place_Q[query]
        is_ancestor = place_Q[query] < end_K[key]
        is_near = position_K[key] >= first_position_Q[query]
        return is_before & is_ancestor & is_near

    return sees


def _tiles(
    share: ContextShare, keys_K: NDArray[np.int64], window: int | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which tiles [rows, columns] may have a visible pair, and in which all
    pairs are visible.

    Places of queries ascend, so the queries that see a key, apart from the window, are
    a range of them. Without a window both results are exact. With one, the first may
    include a tile without such a pair.
    """
    micro_batch = share.micro_batch
    num_rows = _num_tiles(len(share.places_Q))
    num_columns = _num_tiles(len(keys_K))
    first_K = np.searchsorted(share.places_Q, keys_K)
    end_K = np.searchsorted(share.places_Q, micro_batch.ends_P[keys_K])
    column_K = np.arange(len(keys_K)) // FLEX_TILE
    # A key adds 1 at the first row of tiles that has a query of its range, and takes it
    # off after the last.
    changes = np.zeros((num_rows + 1, num_columns), np.int64)
    is_seen_K = first_K < end_K
    np.add.at(changes, (first_K[is_seen_K] // FLEX_TILE, column_K[is_seen_K]), 1)
    np.add.at(
        changes, ((end_K[is_seen_K] - 1) // FLEX_TILE + 1, column_K[is_seen_K]), -1
    )
    is_seen = changes.cumsum(axis=0)[:-1] > 0
    row_starts = np.arange(num_rows)[:, None] * FLEX_TILE
    last_first = _by_tile(np.maximum, first_K, num_columns, filler=_SEEN_BY_NONE)
    first_end = _by_tile(np.minimum, end_K, num_columns, filler=0)
    is_full = (last_first <= row_starts) & (row_starts + FLEX_TILE <= first_end)
    if window is not None:
        positions_K = micro_batch.positions_P[keys_K]
        nearest_query = _by_tile(
            np.minimum, share.positions_Q, num_rows, filler=_SEEN_BY_NONE
        )
        farthest_query = _by_tile(np.maximum, share.positions_Q, num_rows, filler=0)
        last_key = _by_tile(np.maximum, positions_K, num_columns, filler=0)
        first_key = _by_tile(np.minimum, positions_K, num_columns, filler=_SEEN_BY_NONE)
        is_seen &= nearest_query[:, None] - last_key < window
        is_full &= farthest_query[:, None] - first_key < window
    return is_seen, is_full


def _by_tile(
    reduce: np.ufunc, values: NDArray[np.int64], num_tiles: int, *, filler: int
) -> NDArray[np.int64]:
    """Apply `reduce` to the values of each tile, the last of which is filled up."""
    padded = np.full(num_tiles * FLEX_TILE, filler, np.int64)
    padded[: len(values)] = values
    return reduce.reduce(padded.reshape(num_tiles, FLEX_TILE), axis=1)


def _tiles_by_row(
    is_chosen: NDArray[np.bool_], target: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of tiles [1, 1, rows], the number of chosen ones, and [1, 1,
    rows, columns] their columns in ascending order, then those of the others."""
    counts = is_chosen.sum(axis=1, dtype=np.int32)
    columns = (~is_chosen).argsort(axis=1, kind="stable").astype(np.int32)
    return to_device(counts[None, None], target), to_device(columns[None, None], target)


@functools.cache
def _compiled_attention() -> Callable[..., torch.Tensor]:
    """Compile at the first call, into Triton's kernels on a GPU. On a CPU torch
    computes it from the whole matrix of scores, and without a backward pass: that is
    for tests."""
    return torch.compile(_attend, dynamic=True, backend=device.compiler())


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: BlockMask,
    scale: float,
) -> torch.Tensor:
    output = flex_attention(
        queries,
        keys,
        values,
        block_mask=mask,
        scale=scale,
        enable_gqa=True,
        kernel_options=_WHOLE_TILES,
    )
    assert isinstance(output, torch.Tensor)
    return output


def _num_tiles(length: int) -> int:
    return -(-length // FLEX_TILE)


def _padded_indices(
    values: NDArray[np.int64], length: int, filler: int, target: torch.device
) -> torch.Tensor:
    padded = np.full(length, filler, np.int32)
    padded[: len(values)] = values
    return to_device(padded, target)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return [1, heads, length, dim], padded with zeros."""
    num_missing = length - tensor.shape[2]
    if num_missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_missing))
