"""Qwen3: Llama's names, and a norm on each head of q and k."""

from dataclasses import replace

from invrl.train.families import llama
from invrl.train.families.parameter import in_layer

FAMILY = replace(
    llama.FAMILY,
    qk_norm=True,
    layer=(
        *llama.FAMILY.layer,
        in_layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        in_layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ),
)
