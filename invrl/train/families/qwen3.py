"""Qwen3: Llama's names, and a norm on each head of q and k."""

from dataclasses import replace
from typing import ClassVar

from invrl.train.families import llama
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.families.parameter import layer_parameter


class Qwen3Config(HuggingFaceConfig):
    qk_norm: ClassVar[bool] = True


QK_NORMS = (
    layer_parameter("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    layer_parameter("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
)
FAMILY = replace(
    llama.FAMILY,
    model_type="qwen3",
    models="Qwen3 (dense)",
    architecture="Qwen3ForCausalLM",
    sglang_module="qwen3",
    gguf_architecture="qwen3",
    config=Qwen3Config,
    layer=(*llama.FAMILY.layer, *QK_NORMS),
)
