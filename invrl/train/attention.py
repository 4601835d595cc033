"""Core attention on torch SDPA over a packed row of prefix trees.

Megatron's own local attention refuses packed sequences; this one takes `PackedRow` where Megatron
passes its PackedSeqParams, and runs one SDPA call per block of the row (see `packing.py`).
Imported after `device.prepare()`, by `model.py`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from invrl.train import device
from invrl.train.packing import AttentionBlock, MicroBatch


@dataclass
class PackedRow(PackedSeqParams):
    """What the core attention must know of a packed row. The format is [tokens, 1, ...] ("sbhd"), so that
    Megatron applies per-token rotary frequencies as they are given.

    The keys of all blocks are gathered at once and then split: a block that took its own slice would cost a
    gradient as long as the whole row."""

    keys_K: torch.Tensor | None = None
    """Places of the keys of all blocks, block by block; None: [0, P)."""
    num_queries: tuple[int, ...] = ()
    num_keys: tuple[int, ...] = ()
    biases: tuple[torch.Tensor | None, ...] = ()
    """Per block [queries, keys], 0 where a query sees a key, else -inf; None: causal."""

    @staticmethod
    def of(micro_batch: MicroBatch, at: torch.device, dtype: torch.dtype) -> "PackedRow":
        """`dtype`: what attention is computed in; SDPA wants the bias in it."""
        blocks = micro_batch.blocks
        keys = [np.concatenate([b.prefix_K, np.arange(b.start, b.end)]) for b in blocks]
        branching = any(len(block.prefix_K) for block in blocks)
        return PackedRow(
            qkv_format="sbhd",
            keys_K=torch.from_numpy(np.concatenate(keys)).to(at) if branching else None,
            num_queries=tuple(block.end - block.start for block in blocks),
            num_keys=tuple(len(keys_K) for keys_K in keys),
            biases=tuple(_bias(block, at, dtype) for block in blocks),
        )


def _bias(block: AttentionBlock, at: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    if block.mask_QK is None:
        return None
    bias_QK = torch.zeros(block.mask_QK.shape, dtype=dtype)
    return bias_QK.masked_fill_(torch.from_numpy(~block.mask_QK), float("-inf")).to(at)


class TreeAttention(MegatronModule):
    """Core attention of a layer; no parameters."""

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
        """[P, 1, heads, head_dim] each, fewer heads in `key` and `value`; gives [P, 1, heads * head_dim]."""
        assert isinstance(packed_seq_params, PackedRow)
        row, dtype = packed_seq_params, device.attention_dtype(query.dtype)
        # [1, heads, P, head_dim] views
        q, k, v = (tensor.permute(1, 2, 0, 3).to(dtype) for tensor in (query, key, value))
        if row.keys_K is not None:
            k, v = k.index_select(2, row.keys_K), v.index_select(2, row.keys_K)
        sized = ((q, row.num_queries), (k, row.num_keys), (v, row.num_keys))
        parts = zip(*(tensor.split(sizes, dim=2) for tensor, sizes in sized), row.biases, strict=True)
        outputs = [
            scaled_dot_product_attention(
                *part, attn_mask=bias_QK, is_causal=bias_QK is None, scale=self._scale, enable_gqa=True
            )
            for *part, bias_QK in parts
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1).to(query.dtype)
