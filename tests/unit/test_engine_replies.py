"""What is read of an engine's answer: events in whatever pieces they come, tokens whose
weights are known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from invrl.engines.client.generation import GenerateRequest, GenerationReader
from invrl.engines.client.reply_check import ReplyCheck
from invrl.engines.client.sglang_responses import (
    decode_drained,
    decode_event,
    decode_load,
    decode_prompt_logprobs,
    decode_weight_version,
    read_events,
)
from invrl.errors import ServerError, WrongReplyError
from invrl.types.sessions import Sampling


class Pieces:
    """An answer that arrives in pieces of so many bytes."""

    def __init__(self, body: bytes, size: int) -> None:
        self._body = body
        self._size = size

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), self._size):
            yield self._body[start : start + self._size]


def event(version: str, finish: str | None = None, rid: str = "turn-1") -> bytes:
    """One token, sampled under the weights of this label: the first, or the second one
    at the end."""
    num_tokens = 1 if finish is None else 2
    meta: dict[str, Any] = {"id": rid, "prompt_tokens": 1}
    meta["weight_versions"] = [{"version": version, "start": 0, "end": num_tokens}]
    meta["completion_tokens"] = num_tokens
    meta["output_token_logprobs"] = [[-0.5, 7, None]]
    if finish is not None:
        meta["finish_reason"] = {"type": finish}
    return json.dumps({"meta_info": meta, "output_ids": [7]}).encode()


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_events_are_read_in_whatever_pieces_they_arrive(size: int) -> None:
    body = (
        b"".join(b"data: " + event(version) + b"\n\n" for version in "123")
        + b"data: [DONE]\n\n"
    )
    events = [decode_event(found) async for found in read_events(Pieces(body, size))]  # type: ignore[arg-type]
    versions = [
        span.version
        for found in events
        if found.meta_info
        for span in found.meta_info.weight_versions
    ]
    assert versions == ["1", "2", "3"]


def reader() -> GenerationReader:
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    request = GenerateRequest(
        rid="turn-1", input_ids_T=np.array([5], np.int32), sampling=sampling
    )
    check = ReplyCheck(
        rid=request.rid,
        prompt_tokens=1,
        vocab_size=100,
        max_new_tokens=8,
        top_logprobs=0,
        newest_version=None,
    )
    return GenerationReader(request, None, check)


def test_an_abort_is_an_error_of_the_engine_and_brings_no_tokens() -> None:
    generation = reader()
    generation.add(decode_event(event("1")))
    with pytest.raises(ServerError, match="aborted") as failed:
        generation.add(decode_event(event("1", "abort")))
    assert not isinstance(failed.value, WrongReplyError)


def test_the_abort_of_a_request_that_waits_is_no_wrong_reply() -> None:
    """SGLang's message of it has none of the counts."""
    finish = {"type": "abort", "message": "waited too long"}
    aborted = json.dumps({"meta_info": {"id": "turn-1", "finish_reason": finish}})
    with pytest.raises(ServerError, match="waited too long") as failed:
        reader().add(decode_event(aborted.encode()))
    assert not isinstance(failed.value, WrongReplyError)


def test_an_error_of_the_engine_is_reported_in_its_words() -> None:
    with pytest.raises(ServerError, match="out of memory") as failed:
        reader().add(decode_event(b'{"error": {"message": "out of memory"}}'))
    assert not isinstance(failed.value, WrongReplyError)


@pytest.mark.parametrize(
    "decode",
    [
        decode_drained,
        decode_event,
        decode_load,
        decode_prompt_logprobs,
        decode_weight_version,
    ],
)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[7]",
        b"\xff",
        b'{"loads": 7, "drained": 7, "weight_version": 7, "output_ids": 7}',
        b'{"later": ' + b"[" * 100_000,
        b'[{"later": ' + b"[" * 100_000,
    ],
    ids=["empty", "null", "list", "no UTF-8", "other types", "deep", "deep in a list"],
)
def test_an_answer_that_cannot_be_read_is_a_wrong_answer(
    decode: Callable[[bytes], object], data: bytes
) -> None:
    with pytest.raises(WrongReplyError, match="cannot be read"):
        decode(data)


def test_an_answer_to_another_generation_is_refused() -> None:
    with pytest.raises(ServerError, match="turn-2"):
        reader().add(decode_event(event("1", rid="turn-2")))
