"""The words of an export's search."""

from __future__ import annotations

from typing import Any

import pytest

import invrl.viewer.search_words as said_words
from invrl.viewer.search_words import SearchTextWriter, search_words, turn_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("To be, or NOT_to be!", " to be or not to be "),
        ("Z\u00fcrich caf\u00e9 12*13=156", " zurich cafe 12 13 156 "),
        ("\u4f60\u597d <b>x</b>\n", " \u4f60\u597d b x b "),
        ("... _ \0", ""),
        ("", ""),
    ],
)
def test_search_words_are_lower_case_and_without_accents(text: str, words: str) -> None:
    assert search_words(text) == words


def turn(reply: str) -> dict[str, Any]:
    call = {"name": "add", "arguments": '{"a": 1}'}
    asked = {"content": "What?", "reasoning": "", "tool_calls": []}
    return {
        "messages": [asked],
        "reply": {
            "content": reply,
            "reasoning": "hm",
            "tool_calls": [call],
        },
    }


def test_search_words_of_a_turn_cover_prompt_thinking_reply_and_calls() -> None:
    assert turn_words(turn("Four.")) == " what hm four add a 1 "


def test_search_files_are_split_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_words, "_FILE_CHARACTERS", 60)
    written: dict[str, Any] = {}
    writer = SearchTextWriter(written.__setitem__, "said")
    for number in range(5):
        writer.add(f"s-{number}", [turn("long " * 4)])
    writer.close()
    assert written["said"] == {"files": 3, "rollouts": 5}
    assert [[name for name, _ in written[f"said/{number}"]] for number in range(3)] == [
        ["s-0", "s-1"],
        ["s-2", "s-3"],
        ["s-4"],
    ]
    empty: dict[str, Any] = {}
    SearchTextWriter(empty.__setitem__, "said").close()
    assert empty == {"said": {"files": 0, "rollouts": 0}}
