"""Qwen2 and Qwen2.5: Llama's names, and biases on q, k and v."""

from dataclasses import replace

from invrl.train.hf_names import llama
from invrl.train.hf_names.parameter import Parameter

FAMILY = replace(
    llama.FAMILY,
    qkv_bias=True,
    layer=(
        *llama.FAMILY.layer,
        Parameter(
            megatron="decoder.layers.{}.self_attention.linear_qkv.bias",
            hugging_face=(
                "model.layers.{}.self_attn.q_proj.bias",
                "model.layers.{}.self_attn.k_proj.bias",
                "model.layers.{}.self_attn.v_proj.bias",
            ),
            fusion="qkv",
        ),
    ),
)
