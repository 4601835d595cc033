"""The SDPA calls of a layer over a packed row, and their masks.

SDPA on CPU has a kernel only for queries, keys and values of one size; otherwise it
keeps all scores, which are quadratic in the row. Latent attention (MLA) has smaller
values, which are padded. Queries that follow a prefix see all of it, and themselves
causally. SDPA on CPU has no such mask, so a call has an explicit one and takes
`QUERY_CHUNK` queries at most. These masks differ only in size: all of them are views of
one, so that a long row needs the mask of one call, not one of its square.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad, scaled_dot_product_attention

from invrl.train.batches.micro_batch import AttentionBlock
from invrl.train.runtime.device import to_device

QUERY_CHUNK = 1024
"""Queries of one call under an explicit causal mask."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The next queries of a block, and the keys that they see."""

    num_queries: int
    num_keys: int
    """Number of the block's first keys."""
    bias_QK: torch.Tensor | None
    """0 where a query sees a key, else -inf. None: causal, with as many keys as
    queries."""

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Return the output [1, heads, Q, dim] for the queries and keys of the call."""
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=self.bias_QK,
            is_causal=self.bias_QK is None,
            scale=scale,
            enable_gqa=True,
        )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCalls:
    """Calls of all blocks.

    The keys of all blocks are gathered together and then split: separate slices would
    each cost a gradient as long as the whole row.
    """

    keys_K: torch.Tensor | None
    """Places of the keys of all blocks among the keys that the rank has, block by
    block; None: [0, P)."""
    blocks: tuple[tuple[AttentionCall, ...], ...]
    """Calls of each block. The last call of a block has all of its keys."""

    @staticmethod
    def of(
        blocks: Sequence[AttentionBlock],
        gathered_P: NDArray[np.int64] | None,
        target: torch.device,
        dtype: torch.dtype,
    ) -> "AttentionCalls":
        """Build the calls. `gathered_P` is that of `ContextShare`. `dtype` is the dtype
        in which attention is computed; SDPA needs the bias in it."""
        keys_by_block = [
            np.concatenate([block.prefix_K, np.arange(block.start, block.end)])
            for block in blocks
        ]
        keys_K = None
        if gathered_P is not None:
            keys_K = to_device(gathered_P[np.concatenate(keys_by_block)], target)
        elif any(len(block.prefix_K) for block in blocks):
            keys_K = to_device(np.concatenate(keys_by_block), target)
        largest_QK = _largest_causal_bias(blocks, target, dtype)
        block_calls: list[tuple[AttentionCall, ...]] = []
        for block, block_keys_K in zip(blocks, keys_by_block, strict=True):
            num_queries = block.end - block.start
            num_keys = len(block_keys_K)
            if block.mask_QK is not None:
                bias_QK = _bias(block.mask_QK, target, dtype)
                calls = (AttentionCall(num_queries, num_keys, bias_QK),)
            elif len(block.prefix_K) == 0:
                calls = (AttentionCall(num_queries, num_keys, None),)
            else:
                calls = _causal_calls(num_queries, len(block.prefix_K), largest_QK)
            block_calls.append(calls)
        return AttentionCalls(keys_K=keys_K, blocks=tuple(block_calls))

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
        if self.keys_K is not None:
            keys = keys.index_select(2, self.keys_K)
            values = values.index_select(2, self.keys_K)
        value_dim = values.shape[-1]
        dim = max(queries.shape[-1], value_dim)
        queries = _padded(queries, dim)
        keys = _padded(keys, dim)
        values = _padded(values, dim)
        num_queries = [sum(call.num_queries for call in calls) for calls in self.blocks]
        num_keys = [calls[-1].num_keys for calls in self.blocks]
        blocks = zip(
            self.blocks,
            queries.split_with_sizes(num_queries, dim=2),
            keys.split_with_sizes(num_keys, dim=2),
            values.split_with_sizes(num_keys, dim=2),
            strict=True,
        )
        outputs: list[torch.Tensor] = []
        for calls, block_queries, block_keys, block_values in blocks:
            outputs += _attend_block(
                calls, block_queries, block_keys, block_values, scale
            )
        output = outputs[0] if len(outputs) == 1 else _joined(outputs)
        return output if value_dim == dim else output[..., :value_dim]


def _attend_block(
    calls: Sequence[AttentionCall],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> list[torch.Tensor]:
    """Return the output of each call, for the tensors of the whole block. Most blocks
    have one call: then nothing is cut, which would cost an operation of the backward
    pass for each tensor."""
    if len(calls) == 1:
        return [calls[0].attend(queries, keys, values, scale)]
    by_call = queries.split_with_sizes([call.num_queries for call in calls], dim=2)
    return [
        call.attend(
            call_queries,
            keys[:, :, : call.num_keys],
            values[:, :, : call.num_keys],
            scale,
        )
        for call_queries, call in zip(by_call, calls, strict=True)
    ]


def _joined(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all queries' outputs [1, heads, Q, dim]. In memory the heads of a token
    are neighbours, as SDPA's kernels write them and the next layer reads them, so that
    no copy is needed to bring them together."""
    by_token = [output.transpose(1, 2) for output in outputs]
    return torch.cat(by_token, dim=1).transpose(1, 2)


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Pad each vector of `tensor` with zeros to `dim` numbers."""
    missing = dim - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing else tensor


def _bias(
    mask_QK: NDArray[np.bool_], target: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    hidden_QK = torch.from_numpy(~mask_QK)
    bias_QK = torch.zeros(mask_QK.shape, dtype=dtype)
    return bias_QK.masked_fill_(hidden_QK, float("-inf")).to(target)


def _largest_causal_bias(
    blocks: Sequence[AttentionBlock], target: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the bias of as many queries and keys as the largest call that follows a
    prefix."""
    num_queries = 0
    num_keys = 0
    for block in blocks:
        if block.mask_QK is None and len(block.prefix_K):
            num_queries = max(num_queries, min(block.end - block.start, QUERY_CHUNK))
            num_keys = max(num_keys, len(block.prefix_K) + block.end - block.start)
    return _bias(
        np.tri(num_queries, num_keys, num_keys - num_queries, dtype=np.bool_),
        target,
        dtype,
    )


def _causal_calls(
    num_queries: int, num_prefix: int, largest_QK: torch.Tensor
) -> tuple[AttentionCall, ...]:
    """Return the calls of queries that follow a prefix. The last query of each call
    sees the last of its keys: the mask is the lower right corner of the largest one."""
    calls: list[AttentionCall] = []
    for start in range(0, num_queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, num_queries)
        num_keys = num_prefix + end
        corner_QK = largest_QK[
            len(largest_QK) - (end - start) :, largest_QK.shape[1] - num_keys :
        ]
        calls.append(AttentionCall(end - start, num_keys, corner_QK))
    return tuple(calls)
