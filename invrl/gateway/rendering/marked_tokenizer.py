"""Tokenizes rendered texts in which the control tokens of contents are marked
(`content_marks.py`): a marked one becomes the ids of its characters, like any other
text; everything else is tokenized as usual.

A second tokenizer handles texts with marks, and every text if a control token could
appear in it unmarked, because texts are normalized. It is the same one, except that
each control token has another, secret text in it. In the rendered text, the control
tokens without a mark (the template's) are replaced by these secret texts, and the marks
are removed. The remaining control tokens are then ordinary text."""

import secrets
import threading
from collections.abc import Collection, Sequence

from invrl.gateway.rendering.content_marks import MARK, any_token_pattern, without_marks
from invrl.gateway.rendering.tokenizer import FastTokenizer


class MarkedTokenizer:
    """A model's tokenizer, for texts that may have marks. `control_tokens` are those
    that may be marked."""

    def __init__(
        self, tokenizer: FastTokenizer, control_tokens: Collection[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._pattern = any_token_pattern(control_tokens)
        secret = secrets.token_hex(8)
        self._secret_texts: dict[str, str] = {}
        for number, token in enumerate(sorted(control_tokens)):
            self._secret_texts[token] = f"\ufdd1{secret}{number}\ufdd1"
        self._secretive: FastTokenizer | None = None
        self._lock = threading.Lock()

    @property
    def begin_ids(self) -> Sequence[int]:
        return self._tokenizer.begin_ids

    def encode(
        self, text: str, *, inside: bool = False, max_ids: int | None = None
    ) -> list[int]:
        """Encode like the tokenizer."""
        if MARK not in text and not self._tokenizer.finds_normalized_tokens:
            return self._tokenizer.encode(text, inside=inside, max_ids=max_ids)
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._secret_texts[match[0]], text)
        return self._load_secretive().encode(
            without_marks(text), inside=inside, max_ids=max_ids
        )

    def min_tokens(self, text: str) -> int:
        return self._tokenizer.min_tokens(text)

    def decode(self, ids: Sequence[int], *, special: bool, inside: bool = False) -> str:
        return self._tokenizer.decode(ids, special=special, inside=inside)

    def preload(self) -> None:
        """Load the second tokenizer, so that no request has to wait for it."""
        self._load_secretive()

    def _load_secretive(self) -> FastTokenizer:
        with self._lock:
            if self._secretive is None:
                self._secretive = self._tokenizer.with_other_texts(self._secret_texts)
            return self._secretive
