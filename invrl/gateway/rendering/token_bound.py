"""A lower bound of the number of tokens in a text, found without tokenizing it.

However a text is cut into tokens, each of its ASCII letters is in one of them. If no
token of the vocabulary has more than m letters, a text with n letters has at least n /
m tokens. The same holds for digits. It holds only for tokenizers that drop no letter
(see `token_bound`); for all others there is no bound.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CLASSES = (string.ascii_letters.encode(), string.digits.encode())
"""Counted classes of characters."""
_NOT_ASCII = bytes(range(128, 256))
_KEEPING_SPLITS = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}
"""Behaviours of a splitting pre-tokenizer that drop nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """A tokenizer's bound."""

    max_characters: tuple[int, ...]
    """Maximum number of characters of each class in one token."""
    composes: bool
    """Whether the tokenizer joins letters and combining marks (NFC), so that each
    character outside ASCII may remove one ASCII letter."""

    def min_tokens(self, text: str) -> int:
        """Return a number that no tokenization of `text` is below. Takes 10 ms or less
        for a million characters."""
        raw = text.encode("utf-8", "surrogatepass")
        composed = 0
        if self.composes and not text.isascii():
            ascii_bytes = raw.translate(None, _NOT_ASCII)
            composed = len(text) - len(ascii_bytes)
        bound = 0
        for members, max_characters in zip(_CLASSES, self.max_characters, strict=True):
            if max_characters == 0:
                continue
            others = raw.translate(None, members)
            count = len(raw) - len(others) - composed
            rounded_up = -(-count // max_characters)
            bound = max(bound, rounded_up)
        return bound


def token_bound(tokenizer: Mapping[str, Any]) -> TokenBound | None:
    """Return the bound; `tokenizer` is the content of tokenizer.json. None unless the
    tokenizer is byte-level BPE that has every byte as a token, normalizes by NFC or not
    at all, and drops nothing that it splits."""
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    if any(step.get("type") != "NFC" for step in normalizers):
        return None
    splitters = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not _splits_bytes(splitters):
        return None
    if not all(letter in vocabulary for letter in _byte_letters()):
        return None
    texts = list(vocabulary)
    for token in tokenizer.get("added_tokens") or ():
        texts.append(token["content"])
    return TokenBound(
        max_characters=tuple(_max_characters(texts, members) for members in _CLASSES),
        composes=bool(normalizers),
    )


def _max_characters(texts: Sequence[str], members: bytes) -> int:
    """Return the maximum number of characters out of `members` in one of the texts."""
    removed = dict.fromkeys(members)
    most = 0
    for text in texts:
        others = text.translate(removed)
        most = max(most, len(text) - len(others))
    return most


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, in order. A sequence has its
    parts under `name`."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    steps: list[Mapping[str, Any]] = []
    for inner in part.get(name) or ():
        steps.extend(_steps(inner, name))
    return steps


def _splits_bytes(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the pre-tokenizer turns text into bytes and drops nothing before that."""
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return False
    return all(_drops_nothing(step) for step in steps)


def _drops_nothing(step: Mapping[str, Any]) -> bool:
    if step.get("type") in ("ByteLevel", "Digits"):
        return True
    return step.get("type") == "Split" and step.get("behavior") in _KEEPING_SPLITS


def _byte_letters() -> list[str]:
    """Return the characters that stand for the 256 bytes in byte-level vocabularies
    (GPT-2's table). A printable byte stands for itself; the other bytes, in their
    order, are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable]
    return letters + [chr(0x100 + index) for index in range(len(others))]
