"""The text of a reply as its token ids arrive, without half characters and without stop strings."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "�"
"""What a tokenizer writes for bytes that are no whole character."""


class TextStream:
    """Turns ids into text. It never splits a character, and it holds back a stop string and everything that
    may become one. The pieces joined are the text of the reply. `decode` turns ids into text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        """The latest ids. The first `_decoded` of them are in the text already; they are the context in which
        the others are decoded."""
        self._decoded = 0
        self._text = ""
        """Text that was not returned yet: it is, or may become, a stop string."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown now."""
        self._ids += ids
        text = self._new_text()
        if text and not text.endswith(_INCOMPLETE):
            self._text += text
            del self._ids[: self._decoded]
            self._decoded = len(self._ids)
        return self._take(self._safe_length())

    def finish(self) -> str:
        """The rest of the text, once the last id has been pushed."""
        if self._decoded < len(self._ids):
            self._text += self._new_text()
        return self._take(self._stop_position())

    def _new_text(self) -> str:
        """The text of the ids that are not decoded yet."""
        context = self._decode(self._ids[: self._decoded])
        text = self._decode(self._ids)
        return text[len(context) :]

    def _take(self, length: int) -> str:
        taken = self._text[:length]
        self._text = self._text[length:]
        return taken

    def _stop_position(self) -> int:
        """Where the first stop string begins; the length of the text if there is none."""
        position = len(self._text)
        for stop in self._stop:
            found = self._text.find(stop)
            if found >= 0:
                position = min(position, found)
        return position

    def _safe_length(self) -> int:
        """How much of the text cannot be part of a stop string."""
        position = self._stop_position()
        if position < len(self._text):
            return position
        return len(self._text) - partial_mark_length(self._text, self._stop)


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of `text` that may become one of the marks once more text comes."""
    longest = 0
    for mark in marks:
        for length in range(1, len(mark)):
            if length > longest and text.endswith(mark[:length]):
                longest = length
    return longest
