"""DeepSeek-V3: latent attention, first dense layers, then layers with shared experts
and a sigmoid router with a bias that chooses within groups."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from invrl.errors import ConfigError
from invrl.families import qwen3_moe
from invrl.families.model_config import (
    Experts,
    HuggingFaceConfig,
    LatentAttention,
)
from invrl.families.parameter import layer_parameter
from invrl.families.refusal import refused
from invrl.families.rope import Rope, YarnRope, attention_factor, yarn_magnitude
from invrl.types.tasks import Json

_NORM_EPS = 1e-6
"""Epsilon of the norms within attention, whatever config.json says of the others."""
_NEEDED_BY_SGLANG: dict[str, Json] = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
"""Fields that transformers leaves out when it writes config.json."""


class SharedExpertsConfig(HuggingFaceConfig):
    """The experts of DeepSeek-V3, which other families took over."""

    moe_intermediate_size: PositiveInt = 2048
    num_experts_per_tok: int = Field(8, ge=2)
    """Minimum 2: Megatron does not divide the weight of a single expert by itself."""
    n_shared_experts: PositiveInt = 1
    n_routed_experts: PositiveInt = 256
    routed_scaling_factor: PositiveFloat = 2.5
    n_group: PositiveInt = 8
    topk_group: PositiveInt = 4
    first_k_dense_replace: int = Field(3, ge=0)
    # The trainer computes only this value.
    norm_topk_prob: Literal[True] = True

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        parsed = super().read(config)
        parsed._check_groups()
        return parsed

    def _check_groups(self) -> None:
        group_size = self.n_routed_experts // self.n_group
        if self.n_group == 1:
            return
        if self.n_routed_experts % self.n_group or group_size < 2:
            reason = f"n_routed_experts {self.n_routed_experts} is not that many groups of two or more"
            raise refused("n_group", self.n_group, reason)
        if (
            self.topk_group > self.n_group
            or self.topk_group * group_size < self.num_experts_per_tok
        ):
            reason = (
                f"{self.num_experts_per_tok} experts of a token come from so many of {self.n_group} groups "
                f"of {group_size}"
            )
            raise refused("topk_group", self.topk_group, reason)

    def leaves_out(self, name: str) -> bool:
        """Leave out the layers for multi-token prediction, which follow the others.
        transformers does the same."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_behind = layer.isdecimal() and int(layer) >= self.num_hidden_layers
        return is_behind or super().leaves_out(name)

    @property
    def experts(self) -> Experts | None:
        if self.first_k_dense_replace >= self.num_hidden_layers:
            return None
        return Experts(
            count=self.n_routed_experts,
            chosen=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalized=True,
            score="sigmoid",
            has_bias=True,
            scale=self.routed_scaling_factor,
            groups=self.n_group,
            chosen_groups=self.topk_group,
            shared_size=self.moe_intermediate_size * self.n_shared_experts,
            router_in_float32=True,
        )

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace


class DeepseekV3Config(SharedExpertsConfig):
    """`head_dim` is the size of a query, whatever config.json says: transformers uses
    it for another size."""

    q_lora_rank: PositiveInt | None = 1536
    kv_lora_rank: PositiveInt = 512
    qk_nope_head_dim: PositiveInt = 128
    qk_rope_head_dim: PositiveInt = 64
    v_head_dim: PositiveInt = 128
    # Read by SGLang only.
    topk_method: Literal["noaux_tc"] | None = None
    scoring_func: Literal["sigmoid"] | None = None
    moe_layer_freq: Literal[1] | None = None
    # The trainer computes only this value.
    rope_interleave: Literal[True] = True

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        parsed = super().read(
            {name: value for name, value in config.items() if name != "head_dim"}
        )
        if parsed.num_key_value_heads != parsed.num_attention_heads:
            reason = f"latent attention has as many as num_attention_heads {parsed.num_attention_heads}"
            raise refused("num_key_value_heads", parsed.num_key_value_heads, reason)
        return parsed.model_copy(
            update={"head_dim": parsed.qk_nope_head_dim + parsed.qk_rope_head_dim}
        )

    def check_served(self) -> None:
        """Refuse what SGLang computes differently: it gives all norms the same eps,
        treats every scaling of positions as YaRN, and has no default for three
        fields."""
        for name, value in _NEEDED_BY_SGLANG.items():
            if getattr(self, name) is None:
                fix = f'write "{name}": {json.dumps(value)} into its config.json'
                raise ConfigError(
                    f"config.json: {name}", "", "SGLang needs it in this family", fix
                )
        if self.rms_norm_eps != _NORM_EPS:
            reason = f"SGLang has it in the norms within attention too, where transformers has {_NORM_EPS}"
            raise ConfigError(
                "config.json: rms_norm_eps",
                self.rms_norm_eps,
                reason,
                "use another model",
            )
        if not _is_served(self.rope):
            reason = "SGLang computes another YaRN in this family"
            raise ConfigError(
                "config.json: rope_parameters",
                self.rope.kind,
                reason,
                "use another model",
            )

    @property
    def latent_attention(self) -> LatentAttention:
        return LatentAttention(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            norm_eps=_NORM_EPS,
        )

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """Scale of the product: YaRN sharpens all of it by `mscale_all_dim`. Its
        additional factor applies to rotated dimensions."""
        scale = self.head_dim**-0.5
        if isinstance(self.rope, YarnRope) and self.rope.mscale_all_dim:
            scale *= yarn_magnitude(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def _is_served(rope: Rope) -> bool:
    """Whether SGLang's YaRN of this family, which has other defaults, has the same
    factor."""
    if not isinstance(rope, YarnRope):
        return rope.kind == "default"
    mscale = 1.0 if rope.mscale is None else rope.mscale
    of_all_dimensions = yarn_magnitude(rope.factor, rope.mscale_all_dim or 0.0)
    served_factor = yarn_magnitude(rope.factor, mscale) / of_all_dimensions
    return rope.truncate and abs(served_factor - attention_factor(rope)) < 1e-9


ROUTER = (
    layer_parameter("mlp.router.weight", "mlp.gate.weight"),
    layer_parameter(
        "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", dtype="float32"
    ),
    layer_parameter(
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
        fusion="stack",
        sharding="rows",
    ),
    layer_parameter(
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.down_proj.weight",
        sharding="columns",
    ),
)
FAMILY = replace(
    qwen3_moe.FAMILY,
    model_type="deepseek_v3",
    models="DeepSeek-V3, DeepSeek-R1",
    architecture="DeepseekV3ForCausalLM",
    sglang_module="deepseek_v2",
    not_served_on_cpu="SGLang 0.5.21 has no latent attention (MLA) on CPU, its engine dies of a first prompt",
    config=DeepseekV3Config,
    low_rank_query=(
        layer_parameter(
            "self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"
        ),
        layer_parameter(
            "self_attention.linear_q_up_proj.weight",
            "self_attn.q_b_proj.weight",
            sharding="rows",
        ),
        layer_parameter(
            "self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"
        ),
    ),
    full_rank_query=(
        layer_parameter(
            "self_attention.linear_q_proj.weight",
            "self_attn.q_proj.weight",
            sharding="rows",
        ),
    ),
    layer=(
        layer_parameter(
            "self_attention.linear_kv_down_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
        ),
        layer_parameter(
            "self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"
        ),
        layer_parameter(
            "self_attention.linear_kv_up_proj.weight",
            "self_attn.kv_b_proj.weight",
            sharding="rows",
        ),
        layer_parameter(
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            sharding="columns",
        ),
        layer_parameter("input_layernorm.weight", "input_layernorm.weight"),
        layer_parameter("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ),
    router=ROUTER,
    engine_fusions={
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
)
