"""Self-attention over a packed row of prefix trees.

Under context parallelism a rank has the queries of its own tokens, and gathers the keys
and values of all. Megatron's own local attention refuses packed sequences. This one
takes a `PackedRow` where Megatron passes its PackedSeqParams, and runs the SDPA calls
of the row's blocks (`sdpa.py`), or on a GPU one kernel for the whole row
(`flex_attention.py`). Imported after `device.prepare()`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from invrl.families.rope import Rope
from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch
from invrl.train.layers.flex_attention import TreeMask
from invrl.train.layers.rms_norm import RmsNorm, normed
from invrl.train.layers.rotary import RotaryPositions, Turns, turned
from invrl.train.layers.routing_replay import Routing
from invrl.train.layers.sdpa import AttentionCalls
from invrl.train.layers.sliding_window import windowed
from invrl.train.parallel.context_parallel import gather_keys
from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device

_MOST_CALLS = 5
"""Maximum number of SDPA calls that replace a layer's one kernel: four rows, and the
padding."""


RowAttention = TreeMask | AttentionCalls
"""Attention of a layer over a packed row, or over this rank's share of it."""


@dataclass
class PackedRow(PackedSeqParams):
    """Inputs of the attention layers for a packed row, or for this rank's share of it.

    The format is [tokens, 1, ...] ("sbhd"), so that Megatron applies per-token rotary
    frequencies as given.
    """

    attention: Mapping[int | None, RowAttention] = field(default_factory=dict)
    """Attention by the window of a layer."""
    turns: Mapping[Rope, Turns] = field(default_factory=dict)
    """Angles by the rotary positions of a layer."""
    routing: Routing | None = None
    """Experts that the tokens are sent to. None: nothing is replayed or recorded."""

    @staticmethod
    def of(
        share: ContextShare,
        target: torch.device,
        dtype: torch.dtype,
        *,
        windows: Iterable[int | None],
        in_one_kernel: bool,
        positions: Mapping[Rope, RotaryPositions],
        routing: Routing | None,
    ) -> "PackedRow":
        """Build the inputs. `windows` are those of the model's layers. `in_one_kernel`
        selects one kernel for a layer's attention instead of a call per block, unless
        calls are faster. `positions` are the layers' rotary positions."""
        positions_P = to_device(share.positions_Q, target)
        attention: dict[int | None, RowAttention] = {}
        for window in windows:
            blocks = share.own_blocks(_blocks(share.micro_batch, window))
            if in_one_kernel and not _suit_flash_attention(blocks, dtype):
                attention[window] = TreeMask.of(share, window, target)
            else:
                attention[window] = AttentionCalls.of(
                    blocks, share.gathered_P, target, dtype
                )
        return PackedRow(
            qkv_format="sbhd",
            attention=attention,
            turns={
                rope: of_layers.turns(positions_P)
                for rope, of_layers in positions.items()
            },
            routing=routing,
        )


def _blocks(micro_batch: MicroBatch, window: int | None) -> Sequence[AttentionBlock]:
    if window is None:
        return micro_batch.blocks
    return windowed(micro_batch.blocks, micro_batch.positions_P, window)


def _suit_flash_attention(blocks: Sequence[AttentionBlock], dtype: torch.dtype) -> bool:
    """Whether SDPA computes each of the blocks by its flash kernel, and they are few.

    Four rows of 4,096 tokens took an H200 0.56 of the time of the one kernel with heads
    of 128 dimensions and 0.87 with 64, measured while other programs used the card.
    With more calls the host would be the limit.
    """
    are_causal = all(
        len(block.prefix_K) == 0 and block.mask_QK is None for block in blocks
    )
    return (
        are_causal
        and len(blocks) <= _MOST_CALLS
        and dtype in (torch.bfloat16, torch.float16)
    )


class RotarySelfAttention(SelfAttention):
    """Megatron's self-attention over a packed row, with the rotary positions of its
    layer.

    On a GPU one kernel does everything between the projection and the attention: it
    splits queries, keys and values, normalises and rotates them.
    """

    def __init__(self, *args: Any, rope: Rope, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rope = rope

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [P, 1, hidden] of hidden states of that shape, and no
        bias."""
        assert isinstance(packed_seq_params, PackedRow)
        mixed, _bias = cast(Callable[..., Any], self.linear_qkv)(hidden_states)
        turns = packed_seq_params.turns[self._rope]
        query, key, value = _split_and_turned(
            mixed.unflatten(-1, (self.num_query_groups_per_partition, -1)),
            turns.cos,
            turns.sin,
            *_norm_weights(self.q_layernorm, self.k_layernorm),
            head_dim=self.hidden_size_per_attention_head,
            eps=self.config.layernorm_epsilon,
            is_zero_centered=self.config.layernorm_zero_centered_gamma,
        )
        attend = cast(Callable[..., torch.Tensor], self.core_attention)
        if self.checkpoint_core_attention and self.training:
            attend = self._checkpointed_attention_forward
        output = attend(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params
        )
        return self.linear_proj(output)


def _norm_weights(*norms: object) -> list[torch.Tensor | None]:
    """Return the weights of norms. Megatron has an identity where the model has no
    norm."""
    return [norm.weight if isinstance(norm, RmsNorm) else None for norm in norms]


@device.fused_by_row
def _split_and_turned(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm_D: torch.Tensor | None,
    key_norm_D: torch.Tensor | None,
    *,
    head_dim: int,
    eps: float,
    is_zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split queries, keys and values [P, 1, heads, head_dim], the first two normed and
    rotated. `mixed` is [P, 1, key heads, dim]: of each group of heads the queries, then
    the key, then the value. The weights of norms are None for a model without."""
    query, key, value = mixed.split(
        [mixed.shape[-1] - 2 * head_dim, head_dim, head_dim], dim=-1
    )
    query = query.reshape(*query.shape[:2], -1, head_dim)
    if query_norm_D is not None:
        query = normed(query, query_norm_D, eps=eps, is_zero_centered=is_zero_centered)
    if key_norm_D is not None:
        key = normed(key, key_norm_D, eps=eps, is_zero_centered=is_zero_centered)
    # A view of `mixed` would have a gradient that is added to the others' in another
    # pass.
    return turned(query, cos, sin), turned(key, cos, sin), value.clone()


class TreeAttention(MegatronModule):
    """Core attention of a layer. It has no parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        scale: float,
        window: int | None,
        **__: Any,
    ) -> None:
        """`scale` multiplies the products of queries and keys. `window` is that of
        `LayerAttention`."""
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
        """Attend with [P, 1, heads, head_dim] each, with fewer heads in `key` and
        `value`; returns [P, 1, heads * head_dim]."""
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
