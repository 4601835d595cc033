"""Qwen2 and Qwen2.5: Llama's names, and biases on q, k and v."""

from dataclasses import replace

from invrl.train.families import llama
from invrl.train.families.parameter import in_layer

_BIASES = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
FAMILY = replace(
    llama.FAMILY,
    qkv_bias=True,
    layer=(*llama.FAMILY.layer, in_layer("self_attention.linear_qkv.bias", *_BIASES, fusion="qkv")),
)
