"""Control tokens in contents: the texts of messages and tools are marked while a
template renders them.

A message may hold the text of a token that the template itself writes, such as
`<|im_end|>` in a web page that a tool has read. In a rendered text, the message's and
the template's look the same. Before rendering, a mark is therefore put into every such
text of a content, and the mark is still there afterwards (`marked_tokenizer.py` reads
it). The mark is a character that Unicode reserves for such uses. A content that has
this character gets it twice, so that it is not taken for a mark."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

MARK = "\ufdd0"
_MARK_OR_CHARACTER = re.compile(f"{MARK}({MARK}?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTokens:
    """Texts of the tokens that only the template may write."""

    contents: frozenset[str] = frozenset()
    """Texts in everything that a client sends."""
    replies: frozenset[str] = frozenset()
    """Texts in replies. Marks of thinking and of calls may occur there: some clients
    send them so."""


class ContentMarks:
    """Marks control tokens in contents."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._pattern = any_token_pattern(tokens)

    def mark(self, value: Any) -> Any:
        """Return a JSON value with all its texts marked."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, list):
            return [self.mark(part) for part in value]
        if isinstance(value, dict):
            return {self.mark(name): self.mark(part) for name, part in value.items()}
        return value

    def count(self, text: str) -> int:
        """Count the control tokens in a content."""
        if self._pattern is None:
            return 0
        return len(self._pattern.findall(text))

    def _mark_text(self, text: str) -> str:
        text = double_marks(text)
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], text)


def any_token_pattern(tokens: Collection[str]) -> re.Pattern[str] | None:
    """Return an expression that finds the longest of the tokens; None if there are no
    tokens."""
    longest_first = sorted(tokens, key=len, reverse=True)
    if not longest_first:
        return None
    return re.compile("|".join(map(re.escape, longest_first)))


def double_marks(text: str) -> str:
    """Return the text as input of `without_marks`: each of its own characters that
    looks like a mark is doubled."""
    return text.replace(MARK, MARK + MARK)


def without_marks(text: str) -> str:
    """Return the text as it was before it was marked."""
    return _MARK_OR_CHARACTER.sub(r"\1", text)
