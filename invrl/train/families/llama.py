"""Llama, and every model that uses its names (for example SmolLM2)."""

from invrl.train.families.parameter import Family, Parameter, in_layer

FAMILY = Family(
    before=(Parameter("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),),
    layer=(
        in_layer("input_layernorm.weight", "input_layernorm.weight"),
        in_layer(
            "self_attention.linear_qkv.weight",
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
            fusion="qkv",
        ),
        in_layer("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        in_layer("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        in_layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", fusion="stack"),
        in_layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ),
    after=(Parameter("decoder.final_layernorm.weight", ("model.norm.weight",)),),
    head=Parameter("output_layer.weight", ("lm_head.weight",)),
)
