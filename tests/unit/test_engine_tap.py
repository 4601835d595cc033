"""The tap's reading of the wire, whatever pieces the bytes come in and wherever they
end."""

from __future__ import annotations

import json
from collections import deque

import pytest
from engine_tap import EngineTap, _Reader, read_generation

REQUEST = {
    "rid": "turn-1",
    "input_ids": [5, 6],
    "sampling_params": {},
    "stream": True,
}


def event(ids: list[int], total: int, finish: dict | None) -> bytes:
    logprobs = [[-token / 100, token, None] for token in ids]
    meta = {
        "output_token_logprobs": logprobs,
        "weight_versions": [{"version": "3", "start": 0, "end": total}],
        "finish_reason": finish,
    }
    return b"data: " + json.dumps({"text": "", "meta_info": meta}).encode() + b"\n\n"


EVENTS = [
    event([7, 8], 2, None),
    event([9], 3, {"type": "stop", "matched": 9}),
    b"data: [DONE]\n\n",
]


def wire(body: bytes) -> bytes:
    return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


def chunked(parts: list[bytes]) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def read(answer: bytes, size: int, *, times: int = 1) -> tuple[EngineTap, deque]:
    tap = EngineTap("http://127.0.0.1:1")
    waiting = deque()
    there = _Reader(tap, waiting, requests=True)
    back = _Reader(tap, waiting, requests=False)
    for _ in range(times):
        for reader, data in (
            (there, wire(json.dumps(REQUEST).encode())),
            (back, answer),
        ):
            for at in range(0, len(data), size):
                reader.feed(data[at : at + size])
    return tap, waiting


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_tap_reads_a_stream_in_pieces_of_any_size(size: int):
    tap, _ = read(chunked(EVENTS) + b"0\r\n\r\n", size, times=2)
    assert len(tap.generations) == 2
    for generation in tap.generations:
        assert generation.rid == "turn-1"
        assert generation.input_ids == [5, 6]
        assert generation.ids == [7, 8, 9]
        assert generation.logprobs == [-0.07, -0.08, -0.09]
        assert generation.spans == [(3, 0, 3)]
        assert generation.finish == "stop"
        assert generation.matched == 9


def test_tap_of_a_broken_stream_has_its_whole_events():
    parts = [EVENTS[0], EVENTS[1][:30]]
    tap, waiting = read(chunked(parts), 16)
    assert tap.generations == []
    generation = read_generation(waiting[0])
    assert generation.ids == [7, 8]
    assert generation.spans == [(3, 0, 2)]
    assert generation.finish == ""


def test_tap_does_not_read_http2():
    tap = EngineTap("http://127.0.0.1:1")
    waiting = deque()
    there = _Reader(tap, waiting, requests=True)
    back = _Reader(tap, waiting, requests=False)
    there.feed(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x01")
    there.feed(b"\x00\x02")
    back.feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert list(waiting) == []
    assert tap.generations == []
