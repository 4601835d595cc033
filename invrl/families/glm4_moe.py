"""GLM-4.5: Llama's attention, rotary positions on half of each head, and the experts of
DeepSeek-V3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt

from invrl.families import deepseek_v3, qwen3_moe
from invrl.families.refusal import refused
from invrl.families.rope import YarnRope
from invrl.types.tasks import Json


class Glm4MoeConfig(deepseek_v3.SharedExpertsConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Biases of q, k and v only."""
    partial_rotary_factor: float = Field(0.5, gt=0, le=1)
    use_qk_norm: bool = False
    moe_intermediate_size: PositiveInt = 1408
    n_routed_experts: PositiveInt = 128
    routed_scaling_factor: PositiveFloat = 1.0
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    first_k_dense_replace: int = Field(1, ge=0)

    @classmethod
    def read(cls, config: Mapping[str, Json]) -> Self:
        parsed = super().read(config)
        if isinstance(parsed.rope, YarnRope) and parsed.partial_rotary_factor != 1:
            reason = "YaRN's factor of attention over a part of each head"
            raise refused("rope_parameters", config.get("rope_parameters"), reason)
        return parsed

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        return self.use_qk_norm


FAMILY = replace(
    qwen3_moe.FAMILY,
    model_type="glm4_moe",
    models="GLM-4.5, GLM-4.6 and their Air models",
    architecture="Glm4MoeForCausalLM",
    sglang_module="glm4_moe",
    config=Glm4MoeConfig,
    router=deepseek_v3.ROUTER,
)
