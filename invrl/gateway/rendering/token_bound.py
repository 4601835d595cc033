"""The fewest tokens that a text can have, without tokenising it.

Whatever way a text is cut into tokens, each ASCII letter of it is in one of them. A text with n letters
therefore has at least n / m tokens, where m is the most letters that any token of the vocabulary has. The
same goes for digits. This holds only for tokenizers that lose no letter: see `token_bound`. For all others
there is no bound."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CLASSES = (string.ascii_letters.encode(), string.digits.encode())
_NOT_ASCII = bytes(range(128, 256))
_KEEPING_SPLITS = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBound:
    """`most`: of each class of characters, how many a token has at most. `composes`: the tokenizer puts
    letters and combining marks together (NFC), so that each character outside of ASCII may cost a letter."""

    most: tuple[int, ...]
    composes: bool

    def least(self, text: str) -> int:
        """No tokenisation of `text` has fewer tokens. Takes about 10 ms for a million characters or less."""
        raw = text.encode("utf-8", "surrogatepass")
        lost = 0
        if self.composes and not text.isascii():
            lost = len(text) - len(raw.translate(None, _NOT_ASCII))
        least = 0
        for members, most in zip(_CLASSES, self.most, strict=True):
            count = len(raw) - len(raw.translate(None, members)) - lost
            if most:
                least = max(least, -(-count // most))
        return least


def token_bound(tokenizer: Mapping[str, Any]) -> TokenBound | None:
    """`tokenizer`: what tokenizer.json holds. None unless it is byte-level BPE that has every byte as a
    token, normalizes by NFC or not at all, and neither drops nor cuts off what it splits."""
    model = tokenizer.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if tokenizer.get("truncation") is not None:
        return None
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    if any(step.get("type") != "NFC" for step in normalizers):
        return None
    if not _splits_bytes(_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")):
        return None
    if not all(letter in vocabulary for letter in _byte_letters()):
        return None
    texts = [*vocabulary, *(token["content"] for token in tokenizer.get("added_tokens") or ())]
    most = []
    for members in _CLASSES:
        deleted = dict.fromkeys(members)
        most.append(max(len(text) - len(text.translate(deleted)) for text in texts))
    return TokenBound(most=tuple(most), composes=bool(normalizers))


def _steps(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as a list of what it does; a sequence's parts under `name`."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [step for inner in part.get(name) or () for step in _steps(inner, name)]


def _splits_bytes(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the pre-tokenizer turns text into bytes, and loses nothing before that."""
    if not any(step.get("type") == "ByteLevel" for step in steps):
        return False
    for step in steps:
        keeps = step.get("type") in ("ByteLevel", "Digits") or (
            step.get("type") == "Split" and step.get("behavior") in _KEEPING_SPLITS
        )
        if not keeps:
            return False
    return True


def _byte_letters() -> list[str]:
    """The characters that stand for the 256 bytes in byte-level vocabularies (GPT-2's table): printable bytes
    for themselves, the others, in their order, for those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + at) for at in range(len(others))]
