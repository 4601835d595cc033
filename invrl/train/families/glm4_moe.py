"""GLM-4.5: Llama's attention over half of each head's dimensions, first dense layers, then layers with shared
experts and a sigmoid router with a bias."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt

from invrl.train.families import qwen3_moe
from invrl.train.families.model_config import Experts, HuggingFaceConfig
from invrl.train.families.parameter import layer_parameter
from invrl.train.families.refusal import refused
from invrl.train.families.rope import YarnRope
from invrl.types import Json


class Glm4MoeConfig(HuggingFaceConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Of q, k and v only."""
    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    use_qk_norm: bool = False
    moe_intermediate_size: PositiveInt = 1408
    num_experts_per_tok: int = Field(8, ge=2)
    """Megatron does not divide the weight of a single expert by itself."""
    n_shared_experts: PositiveInt = 1
    n_routed_experts: PositiveInt = 128
    routed_scaling_factor: PositiveFloat = 1.0
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    first_k_dense_replace: int = Field(1, ge=0)
    # The trainer computes only this value.
    norm_topk_prob: Literal[True] = True

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        parsed = super().read(config)
        if isinstance(parsed.rope, YarnRope) and parsed.partial_rotary_factor != 1:
            reason = "YaRN's factor of attention over a part of each head"
            raise refused("rope_parameters", config.get("rope_parameters"), reason)
        if parsed.n_group > 1 and parsed.num_experts_per_tok != 2 * parsed.topk_group:
            reason = (
                "a group counts by its two best experts, and Megatron counts num_experts_per_tok / "
                f"topk_group = {parsed.num_experts_per_tok} / {parsed.topk_group} of them"
            )
            raise refused("topk_group", parsed.topk_group, reason)
        return parsed

    def leaves_out(self, name: str) -> bool:
        """The layers for predicting several tokens at once stand behind the others. transformers leaves them
        out too."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_behind = layer.isdecimal() and int(layer) >= self.num_hidden_layers
        return is_behind or super().leaves_out(name)

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.use_qk_norm

    @property
    def experts(self) -> Experts:
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


FAMILY = replace(
    qwen3_moe.FAMILY,
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.6 and their Air models",
    architecture="Glm4MoeForCausalLM",
    sglang_module="glm4_moe",
    gguf_architecture="glm4moe",
    config=Glm4MoeConfig,
    router=(
        layer_parameter("mlp.router.weight", "mlp.gate.weight"),
        layer_parameter("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", dtype="float32"),
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
    ),
)
