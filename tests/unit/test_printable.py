"""Text for a terminal: what would move its cursor is shown, and everything else
stays."""

from __future__ import annotations

import unicodedata

import pytest

from invrl.host.output.printable import one_line, printable, trimmed


def test_control_and_format_characters_are_replaced_in_any_text() -> None:
    everything = "".join(map(chr, range(0x11_0000)))
    shown = printable(everything)
    left = {
        character
        for character in shown
        if unicodedata.category(character) in ("Cc", "Cf", "Cs")
    }
    assert left == {"\n", "\t", "\u200c", "\u200d"}
    assert "\u2028" not in shown
    assert "\u2029" not in shown


@pytest.mark.parametrize(
    "text", ["", "plain", "line\n\tindented", "Grüße 中文 👩‍💻 نص", "\\x1b as written"]
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


def test_lone_surrogates_are_escaped() -> None:
    assert printable("\ud800") == "\\ud800"


def test_trimmed_text_keeps_both_ends_and_counts_the_missing_characters() -> None:
    assert trimmed("short", 5) == "short"
    text = trimmed("a" * 100 + "b" * 900 + "c" * 100, 90)
    assert text == "a" * 60 + " [... 1,010 characters ...] " + "c" * 30


def test_text_on_one_line_has_single_spaces() -> None:
    assert one_line(" a\n\n b\t c ") == "a b c"
