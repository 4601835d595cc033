"""Core attention on torch SDPA over a packed row of prefix trees.

Megatron's own local attention refuses packed sequences; this one takes `PackedRow` where Megatron
passes its PackedSeqParams, and runs one SDPA call per block of the row (see `packing.py`).
Imported after `device.prepare()`, by `model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from invrl.train.packing import AttentionBlock, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """An AttentionBlock on the device. `bias_QK` is 0 where a query sees a key, else -inf."""

    start: int
    end: int
    keys_K: torch.Tensor | None
    """Places of all keys; None: [start, end)."""
    bias_QK: torch.Tensor | None


@dataclass
class PackedRow(PackedSeqParams):
    """What the core attention must know of a packed row. The format is [tokens, 1, ...] ("sbhd"), so that
    Megatron applies per-token rotary frequencies as they are given."""

    blocks: tuple[Block, ...] = ()

    @staticmethod
    def of(micro_batch: MicroBatch, device: torch.device, dtype: torch.dtype) -> PackedRow:
        """`dtype` is the compute dtype: SDPA wants the bias in it."""
        blocks = tuple(_block(block, device, dtype) for block in micro_batch.blocks)
        return PackedRow(qkv_format="sbhd", blocks=blocks)


def _block(block: AttentionBlock, device: torch.device, dtype: torch.dtype) -> Block:
    keys_K = bias_QK = None
    if len(block.prefix_K):
        own = torch.arange(block.start, block.end)
        keys_K = torch.cat([torch.from_numpy(block.prefix_K), own]).to(device)
    if block.mask_QK is not None:
        bias_QK = torch.zeros(block.mask_QK.shape, dtype=dtype)
        bias_QK.masked_fill_(torch.from_numpy(~block.mask_QK), float("-inf"))
        bias_QK = bias_QK.to(device)
    return Block(start=block.start, end=block.end, keys_K=keys_K, bias_QK=bias_QK)


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
        # [1, heads, P, head_dim] views
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        outputs = [self._attend(q, k, v, block) for block in packed_seq_params.blocks]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block) -> torch.Tensor:
        own = slice(block.start, block.end)
        if block.keys_K is None:
            k, v = k[:, :, own], v[:, :, own]
        else:
            k, v = k.index_select(2, block.keys_K), v.index_select(2, block.keys_K)
        return scaled_dot_product_attention(
            q[:, :, own],
            k,
            v,
            attn_mask=block.bias_QK,
            is_causal=block.bias_QK is None,
            scale=self._scale,
            enable_gqa=True,
        )
