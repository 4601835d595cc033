"""Self-attention over a packed row of prefix trees.

Under context parallelism a rank has the queries of its own tokens, and gathers the keys and values of all.
Megatron's own local attention refuses packed sequences. This one takes a `PackedRow` where Megatron
passes its PackedSeqParams, and runs the SDPA calls of the row's blocks (`attention_calls.py`), or on a GPU
one kernel for the whole row (`tree_mask.py`). Imported after `device.prepare()`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from invrl.train import device
from invrl.train.attention_calls import AttentionCalls
from invrl.train.context_parallel import gather_keys
from invrl.train.context_share import ContextShare
from invrl.train.device import to_device
from invrl.train.families.rope import Rope
from invrl.train.micro_batch import AttentionBlock, MicroBatch
from invrl.train.rotary import angles
from invrl.train.routing_replay import Routing
from invrl.train.sliding_window import windowed
from invrl.train.tree_mask import TreeMask


class RowAttention(Protocol):
    """The attention of a layer over a packed row, or over this rank's share of it."""

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """The output [1, heads, Q, dim] for queries of that shape; keys and values [1, heads, K, dim] have
        fewer heads. `scale`: of the products of queries and keys."""
        ...


@dataclass
class PackedRow(PackedSeqParams):
    """What the attention layers need to know of a packed row, or of this rank's share of it.

    The format is [tokens, 1, ...] ("sbhd"), so that Megatron applies per-token rotary frequencies as they are
    given.
    """

    attention: Mapping[int | None, RowAttention] = field(default_factory=dict)
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
        in_one_kernel: bool,
        frequencies: Mapping[Rope, torch.Tensor],
        routing: Routing | None,
    ) -> "PackedRow":
        """`windows`: those of the model's layers. `in_one_kernel`: whether a layer's attention is one kernel,
        not a call per block. `frequencies`: those of the layers' rotary positions."""
        positions_P = to_device(share.positions_Q, target)
        attention: dict[int | None, RowAttention] = {}
        for window in windows:
            if in_one_kernel:
                attention[window] = TreeMask.of(share, window, target)
            else:
                blocks = share.own_blocks(_blocks(share.micro_batch, window))
                attention[window] = AttentionCalls.of(blocks, share.gathered_P, target, dtype)
        return PackedRow(
            qkv_format="sbhd",
            attention=attention,
            angles={
                rope: angles(rope_frequencies, positions_P) for rope, rope_frequencies in frequencies.items()
            },
            routing=routing,
        )


def _blocks(micro_batch: MicroBatch, window: int | None) -> Sequence[AttentionBlock]:
    if window is None:
        return micro_batch.blocks
    return windowed(micro_batch.blocks, micro_batch.positions_P, window)


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
        attention = packed_seq_params.attention[self._window]
        dtype = device.attention_dtype(query.dtype)
        key, value = gather_keys(key, value)
        # Views [1, heads, P, head_dim].
        queries = query.permute(1, 2, 0, 3).to(dtype)
        keys = key.permute(1, 2, 0, 3).to(dtype)
        values = value.permute(1, 2, 0, 3).to(dtype)
        output = attention.attend(queries, keys, values, scale=self._scale)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, -1).to(query.dtype)
