"""Latent self-attention (DeepSeek's MLA) over a packed row of prefix trees.

Megatron's own takes the positions 0, 1, 2, ... of a whole row. Without
TransformerEngine it divides its down projections over tensor-parallel ranks and leaves
the gradient of the rotary key, which all heads share, unsummed. Here the packed row has
the positions, and every rank has the small down projections whole. Imported after
`device.prepare()`.
"""

from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from invrl.families.model_config import LatentAttention
from invrl.families.rope import Rope
from invrl.train.layers.attention import PackedRow, TreeAttention
from invrl.train.layers.rms_norm import RmsNorm
from invrl.train.layers.rotary import turned
from invrl.train.runtime import device


class LatentSelfAttention(MultiLatentAttention):
    """Megatron's latent attention with other projections and positions. Its parameters
    have the names of Megatron's `MLASelfAttention`."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *,
        shape: LatentAttention,
        rope: Rope,
        scale: float,
        **options: Any,
    ) -> None:
        """`scale` multiplies the products of queries and keys."""
        super().__init__(
            config, submodules, layer_number, attn_mask_type, "self", **options
        )
        self.core_attention = TreeAttention(config, scale=scale, window=None)
        self._shape = shape
        self._rope = rope
        heads = config.num_attention_heads
        query_size = heads * (shape.plain_dim + shape.rotary_dim)
        if shape.query_rank is None:
            self.linear_q_proj = self._divided(
                submodules.linear_q_proj, config.hidden_size, query_size
            )
        else:
            self.linear_q_down_proj = WholeLinear(
                config, config.hidden_size, shape.query_rank
            )
            self.q_layernorm = RmsNorm(config, shape.query_rank, shape.norm_eps)
            self.linear_q_up_proj = self._divided(
                submodules.linear_q_up_proj, shape.query_rank, query_size
            )
        key_value_down_size = shape.key_value_rank + shape.rotary_dim
        self.linear_kv_down_proj = WholeLinear(
            config, config.hidden_size, key_value_down_size
        )
        self.kv_layernorm = RmsNorm(config, shape.key_value_rank, shape.norm_eps)
        self.linear_kv_up_proj = self._divided(
            submodules.linear_kv_up_proj,
            shape.key_value_rank,
            heads * (shape.plain_dim + shape.value_dim),
        )

    def _divided(
        self, linear: ModuleSpec | type, input_size: int, output_size: int
    ) -> torch.nn.Module:
        """Return a projection to all heads, which tensor-parallel ranks divide."""
        projection = build_module(
            linear,
            input_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )
        return cast(torch.nn.Module, projection)

    def get_query_key_value_tensors(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values [P, 1, heads, dimensions] of all tokens and
        this rank's heads, and the vectors that queries and keys come from, given this
        rank's part of the tokens [., 1, hidden]."""
        assert isinstance(packed_seq_params, PackedRow)
        turns = packed_seq_params.turns[self._rope]
        shape = self._shape
        if shape.query_rank is None:
            latent_query = hidden_states
            query, _bias = self.linear_q_proj(latent_query)
        else:
            latent_query = self.q_layernorm(self.linear_q_down_proj(hidden_states))
            query, _bias = self.linear_q_up_proj(latent_query)
        query = query.unflatten(-1, (-1, shape.plain_dim + shape.rotary_dim))
        plain_query, rotary_query = query.split(
            [shape.plain_dim, shape.rotary_dim], dim=-1
        )

        down = self.linear_kv_down_proj(hidden_states)
        latent_key, rotary_key = down.split(
            [shape.key_value_rank, shape.rotary_dim], dim=-1
        )
        latent_key = self.kv_layernorm(latent_key)
        key_value, _bias = self.linear_kv_up_proj(latent_key)
        key_value = key_value.unflatten(-1, (-1, shape.plain_dim + shape.value_dim))
        plain_key, value = key_value.split([shape.plain_dim, shape.value_dim], dim=-1)
        # The heads of every rank have a part in its gradient, which is summed over the
        # ranks.
        rotary_key = gather_from_sequence_parallel_region(
            rotary_key, tensor_parallel_output_grad=True
        )

        rotary_query = turned_neighbours(rotary_query, turns.cos, turns.sin)
        rotary_key = turned_neighbours(rotary_key.unsqueeze(2), turns.cos, turns.sin)
        query = torch.cat([plain_query, rotary_query], dim=-1)
        key = torch.cat(
            [plain_key, rotary_key.expand(-1, -1, plain_key.shape[2], -1)], dim=-1
        )
        return query, key, value, latent_query, latent_key


@device.fused_by_row
def turned_neighbours(
    vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Rotate vectors [P, 1, heads, rotary dimensions] of which neighbours are a pair.
    In the result the first numbers of all pairs come first."""
    return turned(torch.cat((vectors[..., 0::2], vectors[..., 1::2]), dim=-1), cos, sin)


class WholeLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole and applies to its part
    of the tokens."""

    def __init__(
        self, config: MLATransformerConfig, input_size: int, output_size: int
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        # Megatron sums the gradient over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight)
