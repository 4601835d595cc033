"""Small tokenizers of every kind that models come with, each with a chat template, as
model folders without weights. They are trained here on a few sentences: nothing is
downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Special tokens around every message, and a line behind its end."""
INST = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- else %}{{- '[INST] ' + message.content + ' [/INST]' }}{%- endif %}"
    "{%- endfor %}"
)
"""Llama-2's and Mistral's: the prompt ends without a special token."""
ZEPHYR = (
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
"""The marks of the roles are no tokens."""
_TEXTS = (
    "What is the weather in Paris? It is 12 degrees, and it rains.",
    "[INST] Hello, how are you? [/INST] I am fine, thank you.",
    "user assistant system tool <|user|> <|assistant|> <|system|>\nand then\n\nsome more lines",
    "The quick brown fox jumps over the lazy dog. Does it? Yes, of course it does!",
) * 4
_CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
_SENTENCE_TOKENS = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a tokenizer is made."""

    make: Callable[[], Tokenizer]
    template: str = CHATML
    special: dict[str, str] = field(default_factory=lambda: {"eos_token": "<|im_end|>"})


def _trained(
    tokenizer: Tokenizer, special: Sequence[str], *, alphabet: Sequence[str] = ()
) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special),
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _byte_level(
    *, prefix_space: bool = False, end: AddedToken | None = None
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    special = _CHAT_TOKENS if end is None else (_CHAT_TOKENS[0],)
    _trained(tokenizer, special, alphabet=pre_tokenizers.ByteLevel.alphabet())
    if end is not None:
        tokenizer.add_special_tokens([end])
    return tokenizer


def _truncating() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_token="<|im_end|>")
    return tokenizer


def _beginning(token: str) -> Tokenizer:
    """Its post-processor writes a token before every text."""
    tokenizer = _byte_level()
    tokenizer.add_special_tokens([token])
    token_id = tokenizer.token_to_id(token)
    template = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, token_id)]
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template]
    )
    return tokenizer


def _byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _sentence_decoder() -> decoders.Decoder:
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return decoders.Sequence(parts)


def _metaspace(scheme: str, special: Sequence[str] = _SENTENCE_TOKENS) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=True)
    tokenizer.decoder = _sentence_decoder()
    return _trained(
        tokenizer, (*special, *_byte_tokens()), alphabet="▁abcxyzABCXYZ0123456789"
    )


def _without_byte_specials(tokenizer: Tokenizer, special: Sequence[str]) -> Tokenizer:
    """The bytes are ordinary pieces of the vocabulary, as in models of
    SentencePiece."""
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [
        t for t in described["added_tokens"] if t["content"] in special
    ]
    return Tokenizer.from_str(json.dumps(described))


def _first_word() -> Tokenizer:
    return _without_byte_specials(_metaspace("first"), _SENTENCE_TOKENS)


def _every_segment() -> Tokenizer:
    special = (*_SENTENCE_TOKENS, *_CHAT_TOKENS)
    return _without_byte_specials(_metaspace("always", special), special)


def _prepending() -> Tokenizer:
    """Llama-2's older form: a normalizer writes the space, and the text is not split
    into words."""
    tokenizer = _metaspace("first")
    described = json.loads(_without_byte_specials(tokenizer, _SENTENCE_TOKENS).to_str())
    described["pre_tokenizer"] = None
    described["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return Tokenizer.from_str(json.dumps(described))


def _never() -> Tokenizer:
    """Gemma's: no space is written, and every text begins with a token."""
    special = ("<unk>", "<bos>", *_CHAT_TOKENS)
    described = json.loads(
        _without_byte_specials(_metaspace("never", special), special).to_str()
    )
    described["pre_tokenizer"] = None
    described["normalizer"] = {
        "type": "Replace",
        "pattern": {"String": " "},
        "content": "▁",
    }
    described["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    tokenizer = Tokenizer.from_str(json.dumps(described))
    token_id = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", token_id)]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    special = (*_SENTENCE_TOKENS, *_CHAT_TOKENS)
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=True)
    tokenizer.decoder = decoders.Metaspace("▁", "first")
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=list(special),
        unk_token="<unk>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz\n"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


_SENTENCE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, Kind] = {
    "byte level": Kind(make=_byte_level),
    "byte level that truncates and pads": Kind(make=_truncating),
    "byte level with a space before the text": Kind(
        make=lambda: _byte_level(prefix_space=True)
    ),
    "byte level with a token before the text": Kind(
        make=lambda: _beginning("<|begin|>"),
        template="{{- bos_token }}" + CHATML,
        special={"bos_token": "<|begin|>", "eos_token": "<|im_end|>"},
    ),
    "end token that takes the whitespace behind it": Kind(
        make=lambda: _byte_level(
            end=AddedToken("<|im_end|>", rstrip=True, special=True)
        )
    ),
    "end token that takes the whitespace before it": Kind(
        make=lambda: _byte_level(
            end=AddedToken("<|im_end|>", lstrip=True, special=True)
        )
    ),
    "space before the first word": Kind(
        make=_first_word, template=INST, special=_SENTENCE
    ),
    "space before the first word, roles as text": Kind(
        make=_first_word, template=ZEPHYR, special=_SENTENCE
    ),
    "space before every segment": Kind(make=_every_segment),
    "space before every segment by a normalizer": Kind(
        make=_prepending, template=INST, special=_SENTENCE
    ),
    "no space, a token before the text": Kind(
        make=_never,
        template="{{- bos_token }}" + CHATML,
        special={"bos_token": "<bos>", "eos_token": "<|im_end|>", "unk_token": "<unk>"},
    ),
    "unigram": Kind(make=_unigram),
}


def make_tokenizer_folder(kind: Kind, folder: Path) -> Path:
    """Writes the files that a renderer and transformers read."""
    folder.mkdir(parents=True, exist_ok=True)
    kind.make().save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": kind.template,
        **kind.special,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings), encoding="utf-8"
    )
    return folder
