"""Megatron's specification of one decoder layer, with what the model's family has
extra.

Everything that differs from layer to layer is bound here: window, rotary positions,
attention scale. Imported after `device.prepare()`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from invrl.families.model_config import HuggingFaceConfig, LatentAttention
from invrl.families.rope import attention_factor
from invrl.train.layers.attention import RotarySelfAttention, TreeAttention
from invrl.train.layers.expert_router import ExpertRouter
from invrl.train.layers.experts import Experts
from invrl.train.layers.latent_attention import LatentSelfAttention
from invrl.train.layers.linear import ColumnLinear, RowLinear
from invrl.train.layers.rms_norm import RmsNorm
from invrl.train.layers.routing_replay import RoutedLayer


def decoder_layer(
    config: HuggingFaceConfig, transformer: TransformerConfig, layer: int
) -> ModuleSpec:
    """`layer`: its number in the whole model, counted from 0."""
    experts = config.experts
    spec = get_gpt_layer_local_spec(
        num_experts=experts.count
        if experts is not None and config.has_experts(layer)
        else None,
        qk_layernorm=config.qk_norm,
        multi_latent_attention=config.latent_attention is not None,
        normalization="RMSNorm",
    )
    if config.has_experts(layer):
        spec.module = RoutedLayer
    block = cast(TransformerLayerSubmodules, spec.submodules)
    if experts is not None and config.has_experts(layer):
        submodules = cast(MoESubmodules, cast(ModuleSpec, block.mlp).submodules)
        submodules.router = ExpertRouter
        cast(ModuleSpec, submodules.experts).module = Experts
    else:
        mlp = cast(MLPSubmodules, cast(ModuleSpec, block.mlp).submodules)
        mlp.linear_fc1 = ColumnLinear
        mlp.linear_fc2 = RowLinear
    block.input_layernorm = RmsNorm
    block.pre_mlp_layernorm = RmsNorm
    if config.post_norms:
        normed_residual = ModuleSpec(
            module=NormedResidual, params={"config": transformer}
        )
        block.self_attn_bda = normed_residual
        block.mlp_bda = normed_residual
    self_attention = cast(ModuleSpec, block.self_attention)
    if config.latent_attention is None:
        _specify_attention(self_attention, config, layer)
    else:
        _specify_latent_attention(self_attention, config, config.latent_attention)
    return spec


def _specify_attention(spec: ModuleSpec, config: HuggingFaceConfig, layer: int) -> None:
    attention = config.attention(layer)
    spec.module = RotarySelfAttention
    spec.params = spec.params | {"rope": attention.rope}
    submodules = cast(SelfAttentionSubmodules, spec.submodules)
    submodules.linear_qkv = ColumnLinear
    submodules.linear_proj = RowLinear
    if config.qk_norm:
        submodules.q_layernorm = RmsNorm
        submodules.k_layernorm = RmsNorm
    # The factor belongs to queries and keys alike, so their products have it twice.
    scale = config.attention_scale * attention_factor(attention.rope) ** 2
    submodules.core_attention = partial(
        TreeAttention, scale=scale, window=attention.window
    )


def _specify_latent_attention(
    spec: ModuleSpec, config: HuggingFaceConfig, shape: LatentAttention
) -> None:
    spec.module = LatentSelfAttention
    # YaRN's factor is of the dimensions that positions turn, not of all: the scale does
    # not have it, but `RotaryPositions`.
    spec.params = spec.params | {
        "shape": shape,
        "rope": config.rope,
        "scale": config.attention_scale,
    }
    submodules = cast(MLASelfAttentionSubmodules, spec.submodules)
    submodules.linear_q_proj = ColumnLinear
    submodules.linear_q_up_proj = ColumnLinear
    submodules.linear_kv_up_proj = ColumnLinear
    submodules.linear_proj = RowLinear
    # Megatron builds it twice; the module sets its own
    submodules.core_attention = torch.nn.Identity


class NormedResidual(RmsNorm):
    """Adds the normalised output of attention or MLP to the residual: stands in place
    of Megatron's bias-dropout-add. There is neither bias nor dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:  # pyright: ignore
        """The function that Megatron calls with (output, bias), the residual and a
        dropout probability."""
        return self._add

    def _add(
        self,
        output_with_bias: tuple[torch.Tensor, Any],
        residual: torch.Tensor,
        _: float,
    ) -> torch.Tensor:
        output, _bias = output_with_bias
        return residual + super().forward(output)
