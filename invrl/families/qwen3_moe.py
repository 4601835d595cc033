"""Qwen3 with experts: Qwen3's attention, and in most layers a router over experts
instead of the MLP."""

from dataclasses import replace

from pydantic import AliasChoices, Field, PositiveInt

from invrl.errors import ConfigError
from invrl.families import qwen3
from invrl.families.model_config import Experts
from invrl.families.parameter import layer_parameter


class Qwen3MoeConfig(qwen3.Qwen3Config):
    decoder_sparse_step: PositiveInt = 1
    moe_intermediate_size: PositiveInt = 768
    num_experts_per_tok: PositiveInt = 8
    num_experts: PositiveInt = Field(
        128, validation_alias=AliasChoices("num_experts", "num_local_experts")
    )
    """transformers 5 writes the second name."""
    norm_topk_prob: bool = False
    mlp_only_layers: list[int] = Field(default_factory=list)

    @property
    def experts(self) -> Experts:
        return Experts(
            count=self.num_experts,
            chosen=self.num_experts_per_tok,
            intermediate_size=self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
        )

    def check_served(self) -> None:
        """Refuse layers without experts: SGLang gives every layer of this family
        experts."""
        dense = [
            layer
            for layer in range(self.num_hidden_layers)
            if not self.has_experts(layer)
        ]
        if dense:
            reason = f"layers {dense} have no experts, and SGLang gives every layer of this family experts"
            raise ConfigError(
                "config.json: mlp_only_layers",
                self.mlp_only_layers,
                reason,
                "use another model",
            )

    def has_experts(self, layer: int) -> bool:
        return (
            layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )


EXPERT = (
    layer_parameter(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        "mlp.experts.{expert}.gate_proj.weight",
        "mlp.experts.{expert}.up_proj.weight",
        fusion="stack",
    ),
    layer_parameter(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        "mlp.experts.{expert}.down_proj.weight",
    ),
)
ENGINE_EXPERTS = {
    "w13_weight": ("gate_proj.weight", "up_proj.weight"),
    "w2_weight": ("down_proj.weight",),
}
FAMILY = replace(
    qwen3.FAMILY,
    model_type="qwen3_moe",
    models="Qwen3 with experts (30B-A3B, 235B-A22B)",
    architecture="Qwen3MoeForCausalLM",
    sglang_module="qwen3_moe",
    config=Qwen3MoeConfig,
    router=(layer_parameter("mlp.router.weight", "mlp.gate.weight"),),
    expert=EXPERT,
    engine_experts=ENGINE_EXPERTS,
)
