"""Llama, and every model that took its names (SmolLM2 among them)."""

from invrl.train.hf_names.parameter import Family, Parameter

FAMILY = Family(
    before=(
        Parameter(megatron="embedding.word_embeddings.weight", hugging_face=("model.embed_tokens.weight",)),
    ),
    layer=(
        Parameter(
            megatron="decoder.layers.{}.input_layernorm.weight",
            hugging_face=("model.layers.{}.input_layernorm.weight",),
        ),
        Parameter(
            megatron="decoder.layers.{}.self_attention.linear_qkv.weight",
            hugging_face=(
                "model.layers.{}.self_attn.q_proj.weight",
                "model.layers.{}.self_attn.k_proj.weight",
                "model.layers.{}.self_attn.v_proj.weight",
            ),
            fusion="qkv",
        ),
        Parameter(
            megatron="decoder.layers.{}.self_attention.linear_proj.weight",
            hugging_face=("model.layers.{}.self_attn.o_proj.weight",),
        ),
        Parameter(
            megatron="decoder.layers.{}.pre_mlp_layernorm.weight",
            hugging_face=("model.layers.{}.post_attention_layernorm.weight",),
        ),
        Parameter(
            megatron="decoder.layers.{}.mlp.linear_fc1.weight",
            hugging_face=(
                "model.layers.{}.mlp.gate_proj.weight",
                "model.layers.{}.mlp.up_proj.weight",
            ),
            fusion="stack",
        ),
        Parameter(
            megatron="decoder.layers.{}.mlp.linear_fc2.weight",
            hugging_face=("model.layers.{}.mlp.down_proj.weight",),
        ),
    ),
    after=(Parameter(megatron="decoder.final_layernorm.weight", hugging_face=("model.norm.weight",)),),
    head=Parameter(megatron="output_layer.weight", hugging_face=("lm_head.weight",)),
)
