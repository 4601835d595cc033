"""The text of a reply as its token ids arrive, without half characters and without stop
strings."""

from collections.abc import Sequence

from invrl.gateway.types import Decode

_INCOMPLETE = "�"
"""Output of a tokenizer for bytes that are no whole character."""
_MAX_PENDING_IDS = 16
"""Longer than the ids of a few characters: their bytes will never form a character."""
_MAX_UNSETTLED_IDS = 256
"""Number of pending ids beyond which their text is shown unchanged, so that the work
for a token is bounded for every decoder."""
_UNSETTLED_CHARACTERS = 4
"""Characters at the end that the next ids may change. A character has up to four bytes,
an id one or more."""
_CONTEXT_IDS = 32
"""Ids kept as context where no character ends between two ids: at least as many bytes
as `_UNSETTLED_CHARACTERS` have."""


class TextStream:
    """Turns ids into text. It never splits a character, and it holds back a stop string
    and everything that may become one. The joined pieces are the text of the reply.

    Invariant: the work for one id is bounded, even if the ids never form a character.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        """Latest ids. The first `_num_context` of them are the context in which the
        others are decoded."""
        self._num_context = 0
        self._num_shown = 0
        """Number of characters of the text of `_ids` that are already in the reply's
        text."""
        self._text = ""
        """Text not returned yet: it is, or may become, a stop string."""

    def is_settled_after(self, ids: Sequence[int]) -> bool:
        """Whether no text at the end may change, or become a stop string, with the ids
        that follow `ids`, which have not been pushed."""
        text = self._decode([*self._ids, *ids])[self._num_shown :]
        if text.endswith(_INCOMPLETE):
            return False
        text = self._text + text
        holds_stop = any(stop in text for stop in self._stop)
        return not holds_stop and partial_mark_length(text, self._stop) == 0

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that may be shown now."""
        self._ids += ids
        text = self._decode(self._ids)
        num_pending = len(self._ids) - self._num_context
        if len(text) > self._num_shown and not text.endswith(_INCOMPLETE):
            self._text += text[self._num_shown :]
            self._keep(self._ids[self._num_context :], rest="")
        elif num_pending > _MAX_PENDING_IDS:
            self._settle(text, num_pending)
        return self._take(self._safe_length())

    def finish(self) -> str:
        """Return the rest of the text, once the last id has been pushed."""
        self._text += self._decode(self._ids)[self._num_shown :]
        return self._take(self._stop_position())

    def _settle(self, text: str, num_pending: int) -> None:
        """Show all of `text`, that of the latest ids, except the characters at its end.
        Earlier ids are forgotten if those characters then stay the same."""
        settled = max(self._num_shown, len(text) - _UNSETTLED_CHARACTERS)
        rest = text[settled:]
        latest_ids = self._ids[-_CONTEXT_IDS:]
        if num_pending > _MAX_UNSETTLED_IDS:
            self._text += text[self._num_shown :]
            self._keep([], rest="")
        elif self._decode(latest_ids).endswith(rest):
            self._text += text[self._num_shown : settled]
            self._keep(latest_ids, rest=rest)

    def _keep(self, ids: list[int], *, rest: str) -> None:
        """Keep these ids as context. `rest` is the end of their text, which is not
        shown yet."""
        self._ids = ids
        self._num_context = len(ids)
        self._num_shown = len(self._decode(ids)) - len(rest)

    def _take(self, length: int) -> str:
        taken = self._text[:length]
        self._text = self._text[length:]
        return taken

    def _stop_position(self) -> int:
        """Return where the first stop string begins; the length of the text if there is
        none."""
        position = len(self._text)
        for stop in self._stop:
            found = self._text.find(stop)
            if found >= 0:
                position = min(position, found)
        return position

    def _safe_length(self) -> int:
        """Return the length of the text that cannot be part of a stop string."""
        position = self._stop_position()
        if position < len(self._text):
            return position
        return len(self._text) - partial_mark_length(self._text, self._stop)


def partial_mark_length(text: str, marks: Sequence[str]) -> int:
    """Count the characters at the end of `text` that may become one of the marks once
    more text comes. The work is bounded by the text: a client's stop string may be a
    megabyte."""
    longest = 0
    for mark in marks:
        begin = text.find(mark[:1], max(0, len(text) - len(mark) + 1))
        while 0 <= begin < len(text) - longest:
            if mark.startswith(text[begin:]):
                longest = len(text) - begin
            begin = text.find(mark[:1], begin + 1)
    return longest
