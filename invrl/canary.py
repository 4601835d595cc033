"""The fixed prompts on which engine and trainer must agree after each weight update (`weight_sync.py`)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def add(a: int, b: int) -> int:\n    return a + b\n\nprint(add(12, 30))  # 42",
    "In 1969 two people walked on the Moon; a third one waited for them in orbit.",
)
_MAX_TOKENS = 32


def canary_prompts(model_folder: Path) -> list[list[int]]:
    """Token ids of a few texts, at most 32 each: prose, code and numbers, so that most of a
    vocabulary's kinds of token are asked for. Needs tokenizer.json only."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids[:_MAX_TOKENS] for text in _TEXTS]
