"""Makes any text safe to show in a terminal.

A model's reply and an exception's message can hold any bytes. An escape sequence in
them would move the cursor, colour the screen or set the terminal's title. Here such
characters become visible.
"""

import unicodedata

_KEPT = "\n\t"
_SEPARATORS = ("Zl", "Zp")
"""Unicode's line and paragraph separators, which break lines in some terminals."""


def printable(text: str) -> str:
    """Return `text` with escapes such as \x1b or \u202e in place of the characters that
    a terminal must not get.

    These are control characters, format characters (some reverse the writing
    direction), and lone surrogates. New lines and tabs stay. The streams of a command
    write escapes for what the terminal's encoding lacks (`utf8_mode.py`).
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    category = unicodedata.category(character)
    if character in _KEPT or not (category.startswith("C") or category in _SEPARATORS):
        return character
    if (
        category == "Co" or character in "\u200c\u200d"
    ):  # private use; joiners, which emoji and scripts need
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def one_line(text: str) -> str:
    """Return `text` with one space in place of any white space."""
    return " ".join(text.split())


def trimmed(text: str, characters: int) -> str:
    """Shorten text to about `characters`: the beginning, the end, and between them the
    number of characters left out."""
    if len(text) <= characters:
        return text
    head = characters * 2 // 3
    tail = characters - head
    left_out = len(text) - head - tail
    return f"{text[:head]} [... {left_out:,} characters ...] {text[-tail:]}"
