"""Gemma 3, its text models: most layers attend over a window and have separate rotary
positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from invrl.families import llama
from invrl.families.model_config import (
    Activation,
    HuggingFaceConfig,
    LayerAttention,
)
from invrl.families.parameter import layer_parameter
from invrl.families.refusal import refused
from invrl.families.rope import Rope, build_rope, rope_fields
from invrl.types.tasks import Json

LayerType = Literal["sliding_attention", "full_attention"]
_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
_PATTERN = 6
"""Default of transformers: each sixth layer attends to all tokens."""


class Gemma3Config(HuggingFaceConfig):
    zero_centered_norms: ClassVar[bool] = True
    post_norms: ClassVar[bool] = True
    activation: ClassVar[Activation] = "gelu_pytorch_tanh"

    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    max_position_embeddings: PositiveInt = 131_072
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveInt = 256
    sliding_window: PositiveInt = 4096
    layer_types: list[LayerType]
    final_logit_softcapping: PositiveFloat | None = None
    local_rope: Rope
    """Rotary positions of the layers with a window; `rope` is that of the others."""
    # The trainer computes only these values of the fields below.
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    attn_logit_softcapping: None = Field(
        None, description="neither transformers nor SGLang computes it"
    )
    use_bidirectional_attention: Literal[False] = False

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        fields: dict[str, object] = dict(config)
        fields["rope"], fields["local_rope"] = _ropes(config)
        layers = config.get("num_hidden_layers", 0)
        pattern = config.get("sliding_window_pattern", _PATTERN)
        if (
            "layer_types" not in config
            and isinstance(layers, int)
            and isinstance(pattern, int)
            and pattern > 0
        ):
            fields["layer_types"] = [
                "sliding_attention" if (layer + 1) % pattern else "full_attention"
                for layer in range(layers)
            ]
        parsed = cls.model_validate(fields)
        if len(parsed.layer_types) != parsed.num_hidden_layers:
            reason = f"it has {len(parsed.layer_types)} entries for {parsed.num_hidden_layers} layers"
            raise refused("layer_types", config.get("layer_types"), reason)
        return parsed

    @property
    def qk_norm(self) -> bool:
        return True

    def attention(self, layer: int) -> LayerAttention:
        if self.layer_types[layer] == "sliding_attention":
            return LayerAttention(self.local_rope, self.sliding_window)
        return LayerAttention(self.rope)

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping


def _ropes(config: Mapping[str, Json]) -> tuple[Rope, Rope]:
    """Return the rotary positions of layers without a window and with one, in the form
    of transformers 4 (a scaling belongs to the first) or by layer kind."""
    by_kind = rope_fields(config, "rope_parameters")
    without_window = dict(rope_fields(by_kind, "full_attention"))
    without_window |= rope_fields(config, "rope_scaling")
    local = dict(config)
    local["rope_theta"] = config.get("rope_local_base_freq")
    return (
        build_rope(without_window, config, default_theta=_GLOBAL_THETA),
        build_rope(
            rope_fields(by_kind, "sliding_attention"),
            local,
            default_theta=_LOCAL_THETA,
        ),
    )


_LLAMA_MLP_NORM = "pre_mlp_layernorm.weight"
_BY_LLAMA = tuple(
    parameter
    for parameter in llama.FAMILY.layer
    if not parameter.megatron.endswith(_LLAMA_MLP_NORM)
)
FAMILY = replace(
    llama.FAMILY,
    model_type="gemma3_text",
    models="Gemma 3, text only (270M, 1B)",
    architecture="Gemma3ForCausalLM",
    sglang_module="gemma3_causal",
    config=Gemma3Config,
    layer=(
        *_BY_LLAMA,
        layer_parameter("self_attn_bda.weight", "post_attention_layernorm.weight"),
        layer_parameter(_LLAMA_MLP_NORM, "pre_feedforward_layernorm.weight"),
        layer_parameter("mlp_bda.weight", "post_feedforward_layernorm.weight"),
    ),
)
