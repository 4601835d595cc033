"""The run's own copy of its tokenizer, so that a copied folder shows text without the
model.

Invariant: a file of the copy is whole or absent. Files that are too large are left out;
the reader then has no text, which is not an error.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invrl.host.files.disk import replacing, write_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer"
"""Name of the folder, below the run's."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_FILE_BYTES = 64 * 2**20
_VOCABULARY = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Notation of SentencePiece tokenizers for a byte that is no whole character."""


def copy_tokenizer(model: Path, folder: Path, *, chat_template: str = "") -> None:
    """Copy the tokenizer's files of the model folder `model` to `folder`, which is
    created. An existing file of the same size stays. `chat_template` is the text of the
    template that the run uses instead of the model's own. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        source = model / name
        if not source.is_file() or (name == _TEMPLATE and chat_template):
            continue
        size = source.stat().st_size
        target = folder / name
        if size > MAX_FILE_BYTES or (
            target.is_file() and target.stat().st_size == size
        ):
            continue
        with replacing(target) as new:
            shutil.copyfile(source, new)
    if chat_template:
        write_atomically(folder / _TEMPLATE, chat_template)


class TokenReader:
    """Converts token ids to texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself. Bytes that are no whole character
        are escapes such as "\\xf0", and an id outside of the vocabulary is "<id>"."""
        return [self._text(int(token_id)) for token_id in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all together, special tokens included."""
        return self._tokenizer.decode(
            [int(token_id) for token_id in ids], skip_special_tokens=False
        )

    def _text(self, token_id: int) -> str:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return f"<{token_id}>"
        if self._has_byte_letters and all(
            letter in _BYTE_OF_LETTER for letter in token
        ):
            return bytes(_BYTE_OF_LETTER[letter] for letter in token).decode(
                errors="backslashreplace"
            )
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)]).decode(errors="backslashreplace")
        return token.replace("▁", " ")

    @cached_property
    def _added(self) -> Mapping[int, str]:
        """Texts of tokens outside of the vocabulary, such as special ones."""
        return {
            number: token.content
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
        }

    @cached_property
    def _has_byte_letters(self) -> bool:
        """Whether tokens are written with one letter for each byte, like GPT-2's."""
        content: dict[str, Any] = json.loads(self._tokenizer.to_str())
        return "ByteLevel" in json.dumps(
            [content.get("decoder"), content.get("pre_tokenizer")]
        )


def token_reader(run: Path, model: Path | None = None) -> TokenReader | None:
    """Return the reader of the run's own copy, else of the model folder `model`. None
    if neither has a whole tokenizer.json."""
    from tokenizers import Tokenizer

    for folder in (run / TOKENIZER_NAME, model):
        if folder is None or not (folder / _VOCABULARY).is_file():
            continue
        try:
            return TokenReader(Tokenizer.from_file(str(folder / _VOCABULARY)))
        except Exception:
            # the library raises a bare Exception for a file that it cannot read
            continue
    return None


def _byte_letters() -> dict[str, int]:
    """Return the letter that stands for each byte in a byte-level vocabulary: the
    byte's own where Latin-1 has a printable letter there, and those from U+0100 on for
    the other bytes, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return byte_of


_BYTE_OF_LETTER = _byte_letters()
