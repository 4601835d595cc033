"""Llama 2 and 3, and every model that uses its names (for example SmolLM2)."""

from invrl.families.family import Family
from invrl.families.parameter import Parameter, layer_parameter

FAMILY = Family(
    model_type="llama",
    models="Llama 2 and 3, SmolLM2 and others that took its names",
    architecture="LlamaForCausalLM",
    sglang_module="llama",
    before=(
        Parameter(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            sharding="rows",
        ),
    ),
    layer=(
        layer_parameter("input_layernorm.weight", "input_layernorm.weight"),
        layer_parameter(
            "self_attention.linear_qkv.weight",
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
            fusion="qkv",
            sharding="rows",
        ),
        layer_parameter(
            "self_attention.linear_proj.weight",
            "self_attn.o_proj.weight",
            sharding="columns",
        ),
        layer_parameter("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ),
    qkv_biases=(
        layer_parameter(
            "self_attention.linear_qkv.bias",
            "self_attn.q_proj.bias",
            "self_attn.k_proj.bias",
            "self_attn.v_proj.bias",
            fusion="qkv",
            sharding="rows",
        ),
    ),
    qk_norms=(
        layer_parameter("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        layer_parameter("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ),
    mlp=(
        layer_parameter(
            "mlp.linear_fc1.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            fusion="stack",
            sharding="rows",
        ),
        layer_parameter(
            "mlp.linear_fc2.weight", "mlp.down_proj.weight", sharding="columns"
        ),
    ),
    after=(Parameter("decoder.final_layernorm.weight", ("model.norm.weight",)),),
    head=Parameter("output_layer.weight", ("lm_head.weight",), sharding="rows"),
)
