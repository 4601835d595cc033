"""Core attention on torch SDPA over a packed row of prefix trees.

Megatron's own local attention refuses packed sequences. This one takes a `PackedRow` where Megatron
passes its PackedSeqParams, and runs one SDPA call per block of the row (see `packing.py`). Imported after
`device.prepare()`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from invrl.train import device
from invrl.train.micro_batch import AttentionBlock, MicroBatch


@dataclass
class PackedRow(PackedSeqParams):
    """What the core attention needs to know of a packed row.

    The format is [tokens, 1, ...] ("sbhd"), so that Megatron applies per-token rotary frequencies as they are
    given. The keys of all blocks are gathered at once and then split: if each block took its own slice, each
    would cost a gradient as long as the whole row.
    """

    keys_K: torch.Tensor | None = None
    """Places of the keys of all blocks, block by block; None: [0, P)."""
    num_queries: tuple[int, ...] = ()
    """Number of queries of each block."""
    num_keys: tuple[int, ...] = ()
    """Number of keys of each block."""
    biases: tuple[torch.Tensor | None, ...] = ()
    """For each block [queries, keys]: 0 where a query sees a key, else -inf; None: causal."""

    @staticmethod
    def of(micro_batch: MicroBatch, target: torch.device, dtype: torch.dtype) -> "PackedRow":
        """`dtype`: the dtype in which attention is computed; SDPA needs the bias in it."""
        blocks = micro_batch.blocks
        keys_by_block = [
            np.concatenate([block.prefix_K, np.arange(block.start, block.end)]) for block in blocks
        ]
        keys_K = None
        if any(len(block.prefix_K) for block in blocks):
            keys_K = torch.from_numpy(np.concatenate(keys_by_block)).to(target)
        return PackedRow(
            qkv_format="sbhd",
            keys_K=keys_K,
            num_queries=tuple(block.end - block.start for block in blocks),
            num_keys=tuple(len(block_keys_K) for block_keys_K in keys_by_block),
            biases=tuple(_bias(block, target, dtype) for block in blocks),
        )


def _bias(block: AttentionBlock, target: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    if block.mask_QK is None:
        return None
    hidden_QK = torch.from_numpy(~block.mask_QK)
    bias_QK = torch.zeros(block.mask_QK.shape, dtype=dtype)
    return bias_QK.masked_fill_(hidden_QK, float("-inf")).to(target)


class TreeAttention(MegatronModule):
    """Core attention of a layer. It has no parameters."""

    def __init__(
        self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        assert config.kv_channels is not None
        self._scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None,
        **_: Any,
    ) -> torch.Tensor:
        """Takes [P, 1, heads, head_dim] each, with fewer heads in `key` and `value`; returns
        [P, 1, heads * head_dim]."""
        assert isinstance(packed_seq_params, PackedRow)
        row = packed_seq_params
        dtype = device.attention_dtype(query.dtype)
        # Views [1, heads, P, head_dim].
        queries = query.permute(1, 2, 0, 3).to(dtype)
        keys = key.permute(1, 2, 0, 3).to(dtype)
        values = value.permute(1, 2, 0, 3).to(dtype)
        if row.keys_K is not None:
            keys = keys.index_select(2, row.keys_K)
            values = values.index_select(2, row.keys_K)
        blocks = zip(
            queries.split(row.num_queries, dim=2),
            keys.split(row.num_keys, dim=2),
            values.split(row.num_keys, dim=2),
            row.biases,
            strict=True,
        )
        outputs: list[torch.Tensor] = []
        for block_queries, block_keys, block_values, bias_QK in blocks:
            output = scaled_dot_product_attention(
                block_queries,
                block_keys,
                block_values,
                attn_mask=bias_QK,
                is_causal=bias_QK is None,
                scale=self._scale,
                enable_gqa=True,
            )
            outputs.append(output)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1).to(query.dtype)
