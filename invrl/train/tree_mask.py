"""Attention over a whole packed row in one kernel: torch's FlexAttention under a block mask.

A packed row is prefix trees in depth-first order, so the tokens that see a token are the ones from its own
place to the last of its descendants (`MicroBatch.ends_P`). The kernel asks that of the pairs in those tiles
of the mask that are neither empty nor full, and leaves the empty ones out. torch computes the backward pass
on a GPU only; on a CPU `attention.py` has one SDPA call per block of the row instead.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from invrl.train import device
from invrl.train.context_share import ContextShare

TILE = 128
"""Queries and keys of one tile. Both are padded to a multiple, so that one compiled kernel serves every
length."""
_QUERIES_AT_ONCE = 8 * TILE
"""Bounds what is in memory while the mask's tiles are found."""
_SEES_NOTHING = -1
_SEEN_BY_NONE = 2**31 - 1

_Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of the indices of batch, head, query and key: whether the query sees the key."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeMask:
    """What the queries of a rank's tokens see among the keys that it has."""

    mask: BlockMask

    @staticmethod
    def of(share: ContextShare, window: int | None, target: torch.device) -> "TreeMask":
        """`window`: a query sees keys less than so many positions before it; None: all of its ancestors."""
        micro_batch = share.micro_batch
        keys_K = np.arange(len(micro_batch.tokens_P))
        if share.gathered_P is not None:
            keys_K[share.gathered_P] = np.arange(len(keys_K))
        num_queries = _multiple_of_tile(len(share.places_Q))
        num_keys = _multiple_of_tile(len(keys_K))
        first_positions_Q = np.zeros_like(share.positions_Q)
        if window is not None:
            first_positions_Q = share.positions_Q - window + 1
        sees = _sees(
            place_Q=_padded_indices(share.places_Q, num_queries, _SEES_NOTHING, target),
            first_position_Q=_padded_indices(first_positions_Q, num_queries, 0, target),
            place_K=_padded_indices(keys_K, num_keys, _SEEN_BY_NONE, target),
            end_K=_padded_indices(micro_batch.ends_P[keys_K], num_keys, 0, target),
            position_K=_padded_indices(micro_batch.positions_P[keys_K], num_keys, 0, target),
        )
        return TreeMask(_block_mask(sees, num_queries, num_keys, target))

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """The output [1, heads, Q, dim] for queries of that shape; keys and values [1, heads, K, dim] have
        fewer heads. `scale`: of the products of queries and keys."""
        num_queries, num_keys = self.mask.seq_lengths
        output = _compiled_attention()(
            _padded(queries, num_queries),
            _padded(keys, num_keys),
            _padded(values, num_keys),
            block_mask=self.mask,
            scale=scale,
            enable_gqa=True,
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
    """The window is in a tensor too: torch compiles a number anew whenever it is another one."""

    def sees(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_before = place_K[key] <= place_Q[query]
        is_ancestor = place_Q[query] < end_K[key]
        is_near = position_K[key] >= first_position_Q[query]
        return is_before & is_ancestor & is_near

    return sees


def _block_mask(sees: _Sees, num_queries: int, num_keys: int, target: torch.device) -> BlockMask:
    """As torch's `create_block_mask`, which has the mask of all pairs in memory at once."""
    none = torch.zeros((), dtype=torch.int32, device=target)
    key_K = torch.arange(num_keys, device=target)
    are_seen: list[torch.Tensor] = []
    are_full: list[torch.Tensor] = []
    for start in range(0, num_queries, _QUERIES_AT_ONCE):
        query_Q = torch.arange(start, min(start + _QUERIES_AT_ONCE, num_queries), device=target)
        seen_QK = sees(none, none, query_Q[:, None], key_K[None, :])
        tiles = seen_QK.view(-1, TILE, num_keys // TILE, TILE)
        are_seen.append(tiles.any(dim=3).any(dim=1))
        are_full.append(tiles.all(dim=3).all(dim=1))
    is_seen = torch.cat(are_seen)
    is_full = torch.cat(are_full)
    partial_counts, partial_tiles = _tiles_by_row(is_seen & ~is_full)
    full_counts, full_tiles = _tiles_by_row(is_full)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_tiles,
        full_counts,
        full_tiles,
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_queries, num_keys),
    )


def _tiles_by_row(is_chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row of tiles [1, 1, rows] how many are chosen, and [1, 1, rows, columns] the columns of these
    in ascending order, then those of the others."""
    counts = is_chosen.sum(dim=-1, dtype=torch.int32)
    columns = is_chosen.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], columns[None, None]


@functools.cache
def _compiled_attention() -> Callable[..., torch.Tensor]:
    """Compiled when it is first called, into Triton's kernels on a GPU. On a CPU torch computes it from the
    whole matrix of scores, and without a backward pass: that is for tests."""
    backend = "inductor" if device.on_cuda() else "eager"
    return torch.compile(flex_attention, dynamic=True, backend=backend)


def _multiple_of_tile(length: int) -> int:
    return -(-length // TILE) * TILE


def _padded_indices(
    values: NDArray[np.int64], length: int, filler: int, target: torch.device
) -> torch.Tensor:
    padded = np.full(length, filler, np.int32)
    padded[: len(values)] = values
    return torch.from_numpy(padded).to(target)


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """[1, heads, length, dim], with zeros after the tensor's own."""
    num_missing = length - tensor.shape[2]
    if num_missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_missing))
