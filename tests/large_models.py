"""Folders of large models as far as an estimate reads them: config.json, and weights of
the right shapes without contents (a sparse file)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

_BFLOAT16_BYTES = 2
_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN3: Mapping[str, Mapping[str, object]] = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""Shapes of the published models, by their names."""


def make_large_model(folder: Path, name: str) -> Path:
    """Write the folder of a Qwen3 model of `QWEN3`."""
    config = {**_COMMON, **QWEN3[name]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    end = 0
    for tensor, shape in _shapes(config):
        start = end
        end += _BFLOAT16_BYTES * prod(shape)
        offsets = [start, end]
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.truncate(8 + len(text) + end)
    return folder


def _shapes(config: Mapping[str, object]) -> Iterator[tuple[str, list[int]]]:
    def size(field: str) -> int:
        value = config[field]
        assert isinstance(value, int)
        return value

    hidden = size("hidden_size")
    heads = size("num_attention_heads") * size("head_dim")
    key_heads = size("num_key_value_heads") * size("head_dim")
    yield "model.embed_tokens.weight", [size("vocab_size"), hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [size("vocab_size"), hidden]
    for layer in range(size("num_hidden_layers")):
        of_layer = f"model.layers.{layer}"
        yield f"{of_layer}.input_layernorm.weight", [hidden]
        yield f"{of_layer}.post_attention_layernorm.weight", [hidden]
        yield f"{of_layer}.self_attn.q_proj.weight", [heads, hidden]
        yield f"{of_layer}.self_attn.k_proj.weight", [key_heads, hidden]
        yield f"{of_layer}.self_attn.v_proj.weight", [key_heads, hidden]
        yield f"{of_layer}.self_attn.o_proj.weight", [hidden, heads]
        yield f"{of_layer}.self_attn.q_norm.weight", [size("head_dim")]
        yield f"{of_layer}.self_attn.k_norm.weight", [size("head_dim")]
        if "num_experts" not in config:
            yield from _mlp(f"{of_layer}.mlp", hidden, size("intermediate_size"))
            continue
        yield f"{of_layer}.mlp.gate.weight", [size("num_experts"), hidden]
        for expert in range(size("num_experts")):
            name = f"{of_layer}.mlp.experts.{expert}"
            yield from _mlp(name, hidden, size("moe_intermediate_size"))


def _mlp(name: str, hidden: int, middle: int) -> Iterator[tuple[str, list[int]]]:
    yield f"{name}.gate_proj.weight", [middle, hidden]
    yield f"{name}.up_proj.weight", [middle, hidden]
    yield f"{name}.down_proj.weight", [hidden, middle]
