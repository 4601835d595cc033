"""The work for a token of a stream has a bound, whatever its bytes are, and the pieces
are the whole text."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.engines.client.sglang_responses import read_events
from invrl.gateway.rendering.text_stream import TextStream, partial_mark_length

Decode = Callable[[Sequence[int]], str]
CHINESE = "漢字仮名交じり文".encode() * 500
SHIFTED = [
    CHINESE[:1],
    *[CHINESE[begin : begin + 3] for begin in range(1, len(CHINESE), 3)],
]
"""Pieces of text of which each ends inside of a character."""


def of_bytes(ids: Sequence[int]) -> str:
    """Each id is a byte, as in a byte-level vocabulary."""
    return bytes(ids).decode(errors="replace")


def of_shifted(ids: Sequence[int]) -> str:
    return b"".join(SHIFTED[number] for number in ids).decode(errors="replace")


def of_fallback(ids: Sequence[int]) -> str:
    """As Llama's decoder: bytes that are no text as a whole are as many marks."""
    try:
        return bytes(ids).decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def of_nothing(ids: Sequence[int]) -> str:
    """Special tokens that are left out."""
    return ""


@pytest.mark.parametrize(
    ("decode", "ids"),
    [
        (of_bytes, [0x80] * 3000),
        (of_bytes, [0xE6, 0xBC] * 1500),
        (of_shifted, list(range(len(SHIFTED)))),
        (of_fallback, [0x80] * 3000),
        (of_fallback, [0x80, *("é" * 1500).encode()]),
        (of_nothing, [7] * 3000),
    ],
    ids=[
        "no character",
        "half characters",
        "split characters",
        "fallback",
        "a bad first byte",
        "nothing",
    ],
)
def test_the_work_for_a_token_has_a_bound(decode: Decode, ids: list[int]):
    decoded = 0

    def counted(some_ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(some_ids)
        return decode(some_ids)

    stream = TextStream(counted, ())
    for token in ids:
        stream.push([token])
    stream.finish()
    assert decoded < 1000 * len(ids)


@pytest.mark.parametrize(
    ("decode", "ids"),
    [
        (of_bytes, [0x80] * 500),
        (of_bytes, [0xE6, 0xBC] * 250),
        (of_bytes, [0x80] * 300 + list("漢字🙂 and more".encode()) + [0xF0] * 100),
        (of_shifted, list(range(len(SHIFTED)))),
        (of_fallback, [0x80] * 500),
    ],
)
def test_the_pieces_of_such_a_reply_are_its_text(decode: Decode, ids: list[int]):
    stream = TextStream(decode, ())
    pieces = [stream.push([token]) for token in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == decode(ids)
    longest_wait = max(
        len(run)
        for run in "".join("x" if piece else "." for piece in pieces).split("x")
    )
    assert longest_wait < 40


@settings(max_examples=300, deadline=None)
@given(
    data=st.lists(
        st.one_of(st.binary(max_size=30), st.text(max_size=10).map(str.encode)),
        max_size=20,
    )
)
def test_any_bytes_are_shown_as_the_whole_text_has_them(data: list[bytes]):
    ids = list(b"".join(data))
    stream = TextStream(of_bytes, ())
    pieces = [stream.push([token]) for token in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == of_bytes(ids)


@given(text=st.text("ab", max_size=12), mark=st.text("ab", min_size=1, max_size=8))
def test_the_longest_beginning_of_a_stop_string_is_held_back(text: str, mark: str):
    begins = [mark[:length] for length in range(len(mark))]
    expected = max(len(begin) for begin in begins if text.endswith(begin))
    assert partial_mark_length(text, ["x", mark]) == expected


def test_text_is_settled_unless_a_character_or_a_stop_string_may_have_begun():
    stream = TextStream(of_bytes, ("END",))
    settled = [True, False, True, True, False, False, True, False, False]
    ids = "aé EN EE".encode()
    fresh = TextStream(of_bytes, ("END",))
    for position, byte in enumerate(ids):
        assert stream.is_settled_after([byte]) == settled[position]
        stream.push([byte])
        assert stream.is_settled_after([]) == settled[position]
        assert fresh.is_settled_after(ids[: position + 1]) == settled[position]
    assert not fresh.is_settled_after(b"the END of it")


def test_a_long_stop_string_costs_no_more_than_the_text():
    """With work for each of its beginnings, a token of this one took a minute."""
    stream = TextStream(of_bytes, ["a" * 1_000_000 + "b"])
    began = time.process_time()
    pieces = [stream.push(b"ca") for _ in range(50)]
    assert pieces == ["c", *["ac"] * 49]
    assert stream.finish() == "a"
    assert time.process_time() - began < 10


async def test_others_get_their_turn_between_the_events_of_one_read():
    event = b"data: {}\n\n"

    class OneRead:
        async def pieces(self) -> AsyncIterator[bytes]:
            yield event * 50

    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    num_events = 0
    try:
        async for _ in read_events(OneRead()):  # type: ignore[arg-type]
            num_events += 1
    finally:
        running.cancel()
    assert num_events == 50
    assert turns >= 49
