"""Qwen2 and Qwen2.5: Llama's names, and biases on q, k and v."""

from dataclasses import replace
from typing import ClassVar

from invrl.train.families import llama
from invrl.train.families.model_config import HuggingFaceConfig
from invrl.train.families.parameter import layer_parameter


class Qwen2Config(HuggingFaceConfig):
    qkv_bias: ClassVar[bool] = True


_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2",
    models="Qwen2, Qwen2.5",
    architecture="Qwen2ForCausalLM",
    sglang_module="qwen2",
    gguf_architecture="qwen2",
    config=Qwen2Config,
    layer=(
        *llama.FAMILY.layer,
        layer_parameter("self_attention.linear_qkv.bias", *_BIASES, fusion="qkv", sharding="rows"),
    ),
)
