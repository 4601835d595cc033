"""The tokenizer of a model folder: text to ids and back.

transformers' tokenizer classes import torch, which would cost the gateway many seconds
and 350 MB. This module reads tokenizer.json with the tokenizers library instead. A test
compares the two."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from invrl.gateway.rendering.prompt_room import LARGE_TEXT, PromptTooLong
from invrl.gateway.rendering.token_bound import TokenBound, token_bound
from invrl.user_code.model_folder import read_optional_json, read_tokenizer

_PROBE = "x"
"""A text that no tokenizer drops."""


class FastTokenizer:
    """The tokenizer in Rust. It adds no special tokens when it encodes."""

    def __init__(self, backend: Tokenizer, bound: TokenBound | None) -> None:
        self._backend = backend
        self._bound = bound

    def encode(
        self, text: str, *, inside: bool = False, max_ids: int | None = None
    ) -> list[int]:
        """Return the ids of the text. Raises PromptTooLong, with the exact number, if
        there are more than `max_ids`. `inside`: the text follows other tokens. Some
        tokenizers write a space before the text that a prompt begins with, and only
        there."""
        separator = self._separator if inside else ""
        encoding = self._encode(separator + text)
        num_before = 1 if separator else 0
        # Checked before `.ids`, which would build a Python list of perhaps millions
        # of ids.
        num_ids = len(encoding) - num_before
        if max_ids is not None and num_ids > max_ids:
            raise PromptTooLong(num_ids, exact=True)
        return encoding.ids[num_before:]

    @cached_property
    def begin_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer's own post-processor writes before a text: the token
        that begins a sequence, if the model was trained with one."""
        whole = self._backend.encode(_PROBE, add_special_tokens=True)
        added = whole.special_tokens_mask
        if 0 not in added:
            return ()
        return tuple(whole.ids[: added.index(0)])

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the text's number of tokens, found without tokenizing
        it; 0 if none is known."""
        if self._bound is None:
            return 0
        return self._bound.min_tokens(text)

    def decode(self, ids: Sequence[int], *, special: bool, inside: bool = False) -> str:
        """Return the text of the ids. `special`: special tokens are included. `inside`:
        the ids follow others, so that a space that they begin with is part of the
        text."""
        if not inside:
            return self._backend.decode(ids, skip_special_tokens=not special)
        text = self._backend.decode(
            [*self._letter_ids, *ids], skip_special_tokens=not special
        )
        return text.removeprefix(self._letter)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the vocabulary does not have it."""
        return self._backend.token_to_id(token)

    def added_tokens(self, *, special_only: bool = False) -> frozenset[str]:
        """Return the texts of the tokens that are found in a text before it is split
        into pieces."""
        tokens = self._backend.get_added_tokens_decoder().values()
        return frozenset(
            token.content for token in tokens if token.special or not special_only
        )

    @cached_property
    def finds_normalized_tokens(self) -> bool:
        """Whether a text may have the id of a token that only its normalized form
        contains: NFKC makes `<s>` of full-width characters."""
        if self._backend.normalizer is None:
            return False
        # Only BPE cannot make a special token out of pieces.
        tokens = self._backend.get_added_tokens_decoder().values()
        return not isinstance(self._backend.model, BPE) or any(
            token.normalized for token in tokens
        )

    def with_other_texts(self, texts: Mapping[str, str]) -> "FastTokenizer":
        """Return the same tokenizer with other texts of these tokens."""
        if not texts:
            return self
        description = json.loads(self._backend.to_str())
        return FastTokenizer(_renamed_tokens(description, texts), self._bound)

    def _encode(self, text: str) -> Any:
        """Return an `Encoding`, whose type stub lacks its length."""
        if len(text) < LARGE_TEXT:
            return self._backend.encode(text, add_special_tokens=False)
        # Only `encode_batch` releases the interpreter lock, so that other threads run
        # meanwhile.
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return encoding

    @cached_property
    def _separator(self) -> str:
        """Special token that does not affect the text after it; "" if the tokenizer has
        none."""
        for token in self._backend.get_added_tokens_decoder().values():
            changes_text = (
                token.lstrip or token.rstrip or token.single_word or token.normalized
            )
            if token.special and not changes_text:
                return token.content
        return ""

    @cached_property
    def _letter_ids(self) -> list[int]:
        """Ids of a letter, used as the text before another."""
        return self._backend.encode(_PROBE, add_special_tokens=False).ids

    @cached_property
    def _letter(self) -> str:
        return self._backend.decode(self._letter_ids)


def load_tokenizer(folder: Path) -> FastTokenizer:
    """Return the tokenizer of a model folder. Raises ConfigError like
    `read_tokenizer`."""
    backend = read_tokenizer(folder)
    bound = token_bound(read_optional_json(folder / "tokenizer.json"))
    return FastTokenizer(backend, bound)


def _renamed_tokens(description: dict[str, Any], texts: Mapping[str, str]) -> Tokenizer:
    """Return the tokenizer of `description` (the content of tokenizer.json), in which
    some tokens have other texts. All tokens keep their ids."""
    added = description["added_tokens"]
    model = description["model"]
    pieces = model["vocab"]
    if isinstance(pieces, dict):
        # An added token that the vocabulary lacks would be numbered by the vocabulary's
        # size.
        pieces |= {token["content"]: token["id"] for token in added}
        model["vocab"] = {
            texts.get(piece, piece): token_id for piece, token_id in pieces.items()
        }
    else:
        model["vocab"] = [[texts.get(piece, piece), score] for piece, score in pieces]
    if "merges" in model:
        model["merges"] = [
            merge for merge in model["merges"] if _merged(merge) not in texts
        ]
    for token in added:
        token["content"] = texts.get(token["content"], token["content"])
    description["post_processor"] = None
    return Tokenizer.from_str(json.dumps(description))


def _merged(merge: str | Sequence[str]) -> str:
    """Return the piece that a merge makes. Older files have its two parts in one
    text."""
    if isinstance(merge, str):
        return merge.replace(" ", "", 1)
    return "".join(merge)
