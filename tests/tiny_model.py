"""Random small models as Hugging Face folders: what tests train and serve.

Invariant: the folder is a function of the arguments (same bytes on every machine), made
without network and without transformers, in milliseconds; plain transformers and SGLang
load it. The tokenizer is byte-level with ChatML, one token per digit, and a text for
every id of the vocabulary, so that any sampled id can be shown and many texts have
several spellings in ids. Called by the fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
"""Families that are made here without transformers; `family_models.py` makes every
one."""
_ARCHITECTURES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
"""Their ids are their places: padding 0, end of turn 2."""
PAD_ID = 0
IM_START_ID = 1
IM_END_ID = 2

CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}"
    "{{- 'Tools:\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string"
    " else call.function.arguments | tojson }}"
    "{{- '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_WORDS = (
    "assistant",
    "user",
    "system",
    "tool",
    "name",
    "arguments",
    "What",
    "is",
    "the",
    "calc",
    "Result",
)


def make_tiny_model(
    path: Path | str,
    *,
    family: Family = "qwen3",
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    vocab_size: int = 512,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    tie_embeddings: bool = False,
    max_positions: int = 2048,
    init_std: float = 0.2,
) -> Path:
    """Write config, weights, tokenizer and generation settings into `path` (made if
    absent).

    `intermediate` defaults to 2 * hidden, `head_dim` to hidden // heads. Every weight
    is random, norms (near 1) and biases too, so that a tensor put in another's place
    shows. Returns `path`.
    """
    if vocab_size < 512:
        raise ValueError(f"vocab_size is {vocab_size}; bytes and words need 512 ids")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = head_dim or hidden // heads
    intermediate = intermediate or 2 * hidden
    config = _hf_config(
        family, dtype, vocab_size, layers, max_positions, tie_embeddings
    ) | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "initializer_range": init_std,
    }
    shapes = dict(
        tensor_shapes(
            family,
            vocab_size=vocab_size,
            layers=layers,
            hidden=hidden,
            intermediate=intermediate,
            q_rows=heads * head_dim,
            kv_rows=kv_heads * head_dim,
            head_dim=head_dim,
            tie_embeddings=tie_embeddings,
        )
    )
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": IM_END_ID, "pad_token_id": PAD_ID, "do_sample": True}
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder, vocab_size, max_positions)
    _write_weights(folder / "model.safetensors", shapes, seed, dtype, init_std)
    return folder


def tensor_shapes(
    family: Family,
    *,
    vocab_size: int,
    layers: int,
    hidden: int,
    intermediate: int,
    q_rows: int,
    kv_rows: int,
    head_dim: int,
    tie_embeddings: bool,
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hugging Face names and shapes of the family, in the checkpoint's order."""
    yield "model.embed_tokens.weight", (vocab_size, hidden)
    for layer in range(layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        for name, rows in (
            ("q_proj", q_rows),
            ("k_proj", kv_rows),
            ("v_proj", kv_rows),
        ):
            yield f"{at}self_attn.{name}.weight", (rows, hidden)
            if family == "qwen2":
                yield f"{at}self_attn.{name}.bias", (rows,)
        if family == "qwen3":
            yield at + "self_attn.q_norm.weight", (head_dim,)
            yield at + "self_attn.k_norm.weight", (head_dim,)
        yield at + "self_attn.o_proj.weight", (hidden, q_rows)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "mlp.gate_proj.weight", (intermediate, hidden)
        yield at + "mlp.up_proj.weight", (intermediate, hidden)
        yield at + "mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not tie_embeddings:
        yield "lm_head.weight", (vocab_size, hidden)


def _hf_config(
    family: Family,
    dtype: str,
    vocab_size: int,
    layers: int,
    max_positions: int,
    tie_embeddings: bool,
) -> dict[str, object]:
    """The fields of a published checkpoint's config.json that do not depend on
    widths."""
    only_here: dict[str, object] = {"mlp_bias": False}
    if family == "mistral":
        only_here = {"sliding_window": None}
    elif family != "llama":
        only_here = {"use_sliding_window": False, "sliding_window": None}
    return only_here | {
        "architectures": [_ARCHITECTURES[family] + "ForCausalLM"],
        "model_type": family,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": PAD_ID,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def _write_weights(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    seed: int,
    dtype: str,
    init_std: float,
) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        value = 1.0 + 0.1 * drawn if "norm" in name else drawn * init_std
        tensors[name] = value.to(getattr(torch, dtype))
    save_file(tensors, path, metadata={"format": "pt"})


def _merges(alphabet: list[str], room: int) -> Iterator[tuple[str, str]]:
    """The first `room` merges: whole words from left to right, then pairs of letters,
    then pairs of any two bytes. Digits never merge."""
    made: set[str] = set()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    others = [symbol for symbol in alphabet if not symbol.isdigit()]
    words = ((word[:at], word[at]) for word in _WORDS for at in range(1, len(word)))
    pairs = (
        (left, right) for pool in (letters, others) for left in pool for right in pool
    )
    for source in (words, pairs):
        for left, right in source:
            if len(made) == room:
                return
            if left + right not in made:
                made.add(left + right)
                yield left, right


def write_tokenizer(folder: Path, vocab_size: int, max_positions: int) -> None:
    """The tokenizer's files, with a text for every id of the vocabulary."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(_merges(alphabet, vocab_size - len(SPECIAL_TOKENS) - len(alphabet)))
    texts = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {text: at for at, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(
                Regex(r" ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]+|\s+"), behavior="isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    # Only the first three vanish with skip_special_tokens: parsers need to see the
    # others.
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in SPECIAL_TOKENS[:3]]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, special=False, normalized=False)
            for text in SPECIAL_TOKENS[3:]
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
