"""Thinking in rendered conversations: its positions, and comparisons that ignore it.

Templates drop the thinking of earlier turns, and trim the whitespace around it, each in
its own way. Two renderings of one conversation are therefore compared without both.
"""

import re

THINK = "<think>"
END_THINK = "</think>"
_WHITESPACE = re.compile(r"\s*")


def find_thoughts(text: str, end_of_turn: str) -> dict[int, int]:
    """Return the beginning and the end of each thought in the text, marks included. A
    thought that does not end within its turn does not count. `end_of_turn` is the token
    that ends a turn, "" if the template has none. The time is linear in the text,
    whatever an agent sends."""
    thoughts: dict[int, int] = {}
    turn_mark = end_of_turn or THINK
    position = 0
    close = -1
    turn_end = -1
    while (begin := text.find(THINK, position)) >= 0:
        # `close` and `turn_end` are only searched for again once they have been passed.
        if close < begin:
            close = text.find(END_THINK, begin)
            if close < 0:
                break
        if turn_end <= begin:
            turn_end = text.find(turn_mark, begin + 1)
            if turn_end < 0:
                turn_end = len(text)
        if turn_end < close:
            position = turn_end
        else:
            position = close + len(END_THINK)
            thoughts[begin] = position
    return thoughts


def without_thinking(text: str, end_of_turn: str) -> str:
    """Return the text without thinking and without any whitespace."""
    visible = "".join(_text_between(text, find_thoughts(text, end_of_turn)))
    return "".join(visible.split())


def equal_without_thinking(text: str, recorded: str, end_of_turn: str) -> bool:
    """Whether `text` is `recorded`, except for thinking and the whitespace around it.
    `text` may have less thinking than `recorded`, and only where `recorded` has
    some."""
    text = f"|{text}|"
    recorded = f"|{recorded}|"
    thoughts = find_thoughts(text, end_of_turn)
    parts = _text_between(recorded, find_thoughts(recorded, end_of_turn))
    position = 0
    for index, part in enumerate(parts):
        part = part.strip()
        if index > 0:
            position = _skip_whitespace(text, position)
            continues_here = part != "" and text.startswith(part, position)
            if position in thoughts and not continues_here:
                position = _skip_whitespace(text, thoughts[position])
        if not text.startswith(part, position):
            return False
        position += len(part)
    return position == len(text)


def _text_between(text: str, thoughts: dict[int, int]) -> list[str]:
    """Return the parts of the text before, between and after the thoughts."""
    parts: list[str] = []
    end = 0
    for thought_begin, thought_end in thoughts.items():
        parts.append(text[end:thought_begin])
        end = thought_end
    parts.append(text[end:])
    return parts


def _skip_whitespace(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    assert match is not None, "the pattern matches the empty string too"
    return match.end()
