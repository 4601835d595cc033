"""The words of rollouts, for the search of an export, which has no database."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WORD = re.compile(r"[^\W_]+")
_FILE_CHARACTERS = 1_000_000


def search_words(text: str) -> str:
    """Return the words in lower case and without accents, with one space before and
    after each: " to be ". `search_words.js` normalises search text in the same way."""
    lowered = text.lower()
    if not lowered.isascii():
        decomposed = unicodedata.normalize("NFD", lowered)
        lowered = "".join(
            letter for letter in decomposed if unicodedata.category(letter) != "Mn"
        )
    words = _WORD.findall(lowered)
    return f" {' '.join(words)} " if words else ""


def turn_words(turn: Mapping[str, Any]) -> str:
    """Return the words of a turn of `rollout_detail`: content, thinking and calls of
    its messages and its reply."""
    texts: list[str] = []
    for message in [*turn["messages"], turn["reply"]]:
        calls = [
            f"{call['name']} {call['arguments']}" for call in message["tool_calls"]
        ]
        texts += [message["reasoning"], message["content"], *calls]
    return search_words("\n".join(texts))


class SearchTextWriter:
    """Writes files of about a million characters. `write` takes a path and its value.
    `path`/N has the rows of file N: each rollout's session id and the words of each
    turn. `path` has the number of files."""

    def __init__(self, write: Callable[[str, Any], None], path: str) -> None:
        self._write = write
        self._path = path
        self._rows: list[tuple[str, list[str]]] = []
        self._characters = 0
        self._files = 0
        self._rollouts = 0

    def add(self, session_id: str, turns: Sequence[Mapping[str, Any]]) -> None:
        """`turns`: those of `rollout_detail`, with whole texts."""
        words = [turn_words(turn) for turn in turns]
        self._rows.append((session_id, words))
        self._rollouts += 1
        self._characters += sum(map(len, words))
        if self._characters >= _FILE_CHARACTERS:
            self._end_file()

    def close(self) -> None:
        """Write the last file. Call this when all are added."""
        if self._rows:
            self._end_file()
        self._write(self._path, {"files": self._files, "rollouts": self._rollouts})

    def _end_file(self) -> None:
        self._write(f"{self._path}/{self._files}", self._rows)
        self._rows = []
        self._characters = 0
        self._files += 1
