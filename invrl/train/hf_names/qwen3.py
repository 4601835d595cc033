"""Qwen3: Llama's names, and a norm on each head of q and k."""

from dataclasses import replace

from invrl.train.hf_names import llama
from invrl.train.hf_names.parameter import Parameter

FAMILY = replace(
    llama.FAMILY,
    qk_norm=True,
    layer=(
        *llama.FAMILY.layer,
        Parameter(
            megatron="decoder.layers.{}.self_attention.q_layernorm.weight",
            hugging_face=("model.layers.{}.self_attn.q_norm.weight",),
        ),
        Parameter(
            megatron="decoder.layers.{}.self_attention.k_layernorm.weight",
            hugging_face=("model.layers.{}.self_attn.k_norm.weight",),
        ),
    ),
)
