"""Self-attention over a packed row of prefix trees, on torch SDPA.

Under context parallelism a rank has the queries of its own tokens, and gathers the keys and values of all.
Megatron's own local attention refuses packed sequences. This one takes a `PackedRow` where Megatron
passes its PackedSeqParams, and runs one SDPA call per block of the row (see `packing.py`). Imported after
`device.prepare()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from invrl.train import device
from invrl.train.context_parallel import gather_keys
from invrl.train.context_share import ContextShare
from invrl.train.families.rope import Rope
from invrl.train.micro_batch import AttentionBlock
from invrl.train.rotary import angles
from invrl.train.routing_replay import Routing
from invrl.train.sliding_window import windowed


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCalls:
    """The SDPA calls of a layer over a packed row.

    The keys of all blocks are gathered at once and then split: if each block took its own slice, each would
    cost a gradient as long as the whole row.
    """

    keys_K: torch.Tensor | None
    """Places of the keys of all blocks among the keys that the rank has, block by block; None: [0, P)."""
    num_queries: tuple[int, ...]
    """Number of queries of each block."""
    num_keys: tuple[int, ...]
    """Number of keys of each block."""
    biases: tuple[torch.Tensor | None, ...]
    """For each block [queries, keys]: 0 where a query sees a key, else -inf; None: causal."""

    @staticmethod
    def of(
        blocks: Sequence[AttentionBlock],
        gathered_P: NDArray[np.int64] | None,
        target: torch.device,
        dtype: torch.dtype,
    ) -> "AttentionCalls":
        """`gathered_P`: as in `ContextShare`. `dtype`: the dtype in which attention is computed; SDPA needs
        the bias in it."""
        keys_by_block = [
            np.concatenate([block.prefix_K, np.arange(block.start, block.end)]) for block in blocks
        ]
        keys_K = None
        if gathered_P is not None:
            keys_K = torch.from_numpy(gathered_P[np.concatenate(keys_by_block)]).to(target)
        elif any(len(block.prefix_K) for block in blocks):
            keys_K = torch.from_numpy(np.concatenate(keys_by_block)).to(target)
        return AttentionCalls(
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


@dataclass
class PackedRow(PackedSeqParams):
    """What the attention layers need to know of a packed row, or of this rank's share of it.

    The format is [tokens, 1, ...] ("sbhd"), so that Megatron applies per-token rotary frequencies as they are
    given.
    """

    calls: Mapping[int | None, AttentionCalls] = field(default_factory=dict)
    """By the window of a layer."""
    angles: Mapping[Rope, torch.Tensor] = field(default_factory=dict)
    """By the rotary positions of a layer: the angles [P, 1, 1, rotated dimensions] of each token."""
    routing: Routing | None = None
    """Which experts the tokens are sent to. None: nothing is replayed or recorded."""

    @staticmethod
    def of(
        share: ContextShare,
        target: torch.device,
        dtype: torch.dtype,
        *,
        windows: Iterable[int | None],
        frequencies: Mapping[Rope, torch.Tensor],
        routing: Routing | None,
    ) -> "PackedRow":
        """`windows`: those of the model's layers. `frequencies`: those of their rotary positions."""
        positions_P = torch.from_numpy(share.positions_Q).to(target)
        micro_batch = share.micro_batch
        calls: dict[int | None, AttentionCalls] = {}
        for window in windows:
            blocks: Sequence[AttentionBlock] = micro_batch.blocks
            if window is not None:
                blocks = windowed(blocks, micro_batch.positions_P, window)
            calls[window] = AttentionCalls.of(share.own_blocks(blocks), share.gathered_P, target, dtype)
        return PackedRow(
            qkv_format="sbhd",
            calls=calls,
            angles={
                rope: angles(rope_frequencies, positions_P) for rope, rope_frequencies in frequencies.items()
            },
            routing=routing,
        )


class RotarySelfAttention(SelfAttention):
    """Megatron's self-attention with the rotary positions of its own layer, from the packed row."""

    def __init__(self, *args: Any, rope: Rope, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rope = rope

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSeqParams | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert isinstance(packed_seq_params, PackedRow)
        options["rotary_pos_emb"] = packed_seq_params.angles[self._rope]
        return super().forward(hidden_states, packed_seq_params=packed_seq_params, **options)


class TreeAttention(MegatronModule):
    """Core attention of a layer. It has no parameters."""

    def __init__(
        self, config: TransformerConfig, *_: Any, scale: float, window: int | None, **__: Any
    ) -> None:
        """`scale`: of the products of queries and keys. `window`: as in `LayerAttention`."""
        super().__init__(config=config)
        self._scale = scale
        self._window = window

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
        calls = packed_seq_params.calls[self._window]
        dtype = device.attention_dtype(query.dtype)
        key, value = gather_keys(key, value)
        # Views [1, heads, P, head_dim].
        queries = query.permute(1, 2, 0, 3).to(dtype)
        keys = key.permute(1, 2, 0, 3).to(dtype)
        values = value.permute(1, 2, 0, 3).to(dtype)
        if calls.keys_K is not None:
            keys = keys.index_select(2, calls.keys_K)
            values = values.index_select(2, calls.keys_K)
        blocks = zip(
            queries.split(calls.num_queries, dim=2),
            keys.split(calls.num_keys, dim=2),
            values.split(calls.num_keys, dim=2),
            calls.biases,
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
