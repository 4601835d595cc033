"""How long a reply in the middle waits for another engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
)
from invrl.errors import NoEngineError, ServerError
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns import reply_sampling
from invrl.gateway.turns.continuation import NotMoved
from invrl.gateway.turns.reply_sampling import WHOLE_REPLY_INTERVAL, ReplySampling
from invrl.types.sessions import Sampling
from invrl.types.tasks import Json
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

NO_ENGINE = NoEngineError("the router has no engine")
DEATH = ServerError("the engine died")
Step = int | ServerError


class ScriptedSampler:
    """Samples the tokens of a script, up to the next error in it for each request."""

    def __init__(self, *script: Step) -> None:
        self._script = list(script)
        self.requests: list[GenerateRequest] = []

    async def stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[GenerateChunk | GenerateEnd, None]:
        self.requests.append(request)
        spans: tuple[VersionSpan, ...] = ()
        while self._script:
            step = self._script.pop(0)
            if isinstance(step, ServerError):
                raise step
            num_tokens = spans[-1].end + 1 if spans else 1
            spans = (VersionSpan(version=WeightVersion(0), start=0, end=num_tokens),)
            yield GenerateChunk(
                ids_T=np.array([step], np.int32),
                logprobs_T=np.array([-0.5], np.float32),
                spans=spans,
            )
        yield GenerateEnd(
            spans=spans, finish_reason="stop", matched_stop=None, cached_tokens=0
        )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reply_sampling, "_RETRY_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(reply_sampling, "_ENGINE_POLL_S", 0.0)


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def sampling_of(
    sampler: ScriptedSampler,
    *,
    stream: bool = True,
    engine_return_s: float = 600.0,
    stop: tuple[str, ...] = (),
    **extra_sampling: Json,
) -> ReplySampling:
    request = GenerateRequest(
        rid="turn-1",
        input_ids_T=np.array([5, 6], np.int32),
        sampling=Sampling(max_new_tokens=8),
        stop=stop,
        extra_sampling=extra_sampling,
    )
    return ReplySampling(
        request,
        stream=stream,
        sampler=sampler,
        text_stream=TextStream(text_of, stop),
        engine_return_s=engine_return_s,
    )


async def taken(reply: ReplySampling) -> list[int]:
    ids: list[int] = []
    await reply.run(lambda chunk: ids.extend(chunk.ids_T.tolist()))
    return ids


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_waits_in_the_middle_while_there_is_no_engine(stream: bool):
    sampler = ScriptedSampler(30, 31, DEATH, *[NO_ENGINE] * 20, 32, 33)
    reply = sampling_of(sampler, stream=stream)
    assert await taken(reply) == [30, 31, 32, 33]
    assert len(sampler.requests) == 22
    assert len({request.rid for request in sampler.requests}) == 22
    assert reply.segments.num_segments == 2
    assert reply.not_moved is None


async def test_a_router_may_take_any_number_of_requests_to_notice_a_dead_engine():
    """Tries are for engines that get the request."""
    sampler = ScriptedSampler(30, DEATH, DEATH, *[NO_ENGINE] * 20, DEATH, 31)
    reply = sampling_of(sampler)
    with pytest.raises(ServerError, match="the engine died"):
        await taken(reply)
    sampler = ScriptedSampler(
        30, DEATH, *[NO_ENGINE] * 20, DEATH, *[NO_ENGINE] * 20, 31
    )
    assert await taken(sampling_of(sampler)) == [30, 31]


async def test_a_whole_reply_comes_in_few_events_and_is_taken_at_once():
    sampler = ScriptedSampler(30, 31, DEATH, 32)
    reply = sampling_of(sampler, stream=False)
    chunks: list[GenerateChunk] = []
    await reply.run(chunks.append)
    [chunk] = chunks
    assert chunk.ids_T.tolist() == [30, 31, 32]
    assert chunk.logprobs_T.tolist() == [-0.5] * 3
    assert chunk.spans == reply.segments.spans
    intervals = [request.stream_interval for request in sampler.requests]
    assert intervals == [WHOLE_REPLY_INTERVAL] * 2


async def test_a_streamed_reply_comes_token_for_token():
    sampler = ScriptedSampler(30, 31)
    assert await taken(sampling_of(sampler)) == [30, 31]
    assert [request.stream_interval for request in sampler.requests] == [None]


async def test_a_whole_reply_that_no_engine_can_continue_is_sampled_anew():
    sampler = ScriptedSampler(30, 31, DEATH, 40, 41)
    reply = sampling_of(sampler, stream=False, regex="a")
    assert await taken(reply) == [40, 41]
    first, second = sampler.requests
    assert second.input_ids_T.tolist() == first.input_ids_T.tolist()
    assert second.sampling.max_new_tokens == 8
    assert second.rid != first.rid
    assert reply.segments.num_segments == 1
    assert reply.segments.spans[-1].end == 2
    assert reply.not_moved is None


async def test_a_whole_reply_is_not_sampled_anew_for_ever():
    sampler = ScriptedSampler(30, DEATH, 31, DEATH, 32, DEATH, 33)
    reply = sampling_of(sampler, stream=False, regex="a")
    ids: list[int] = []
    with pytest.raises(ServerError):
        await reply.run(lambda chunk: ids.extend(chunk.ids_T.tolist()))
    assert ids == [32]
    assert reply.not_moved is NotMoved.NO_ENGINE
    assert len(sampler.requests) == 3


@pytest.mark.parametrize(
    ("sampled", "text"), [("one EN", "two"), ("one END", "two"), ("one", "onetwo")]
)
async def test_a_whole_reply_is_continued_unless_a_stop_string_may_have_begun(
    sampled: str, text: str
):
    sampler = ScriptedSampler(*sampled.encode(), DEATH, *b"two")
    reply = sampling_of(sampler, stream=False, stop=("END",))
    assert text_of(await taken(reply)) == text


async def test_a_whole_reply_that_is_cancelled_keeps_its_tokens():
    sampler = ScriptedSampler(30, 31, DEATH, *[NO_ENGINE] * 10**6)
    reply = sampling_of(sampler, stream=False)
    ids: list[int] = []
    sampling = asyncio.create_task(
        reply.run(lambda chunk: ids.extend(chunk.ids_T.tolist()))
    )
    while len(sampler.requests) < 3:
        await asyncio.sleep(0)
    sampling.cancel()
    await asyncio.wait([sampling])
    assert ids == [30, 31]
    assert reply.segments.num_sampled == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([30, DEATH, NO_ENGINE, NO_ENGINE], NoEngineError),
        ([30, DEATH, DEATH, DEATH], ServerError),
    ],
)
async def test_a_reply_that_nobody_continues_fails_with_the_last_error(
    script: Sequence[Step], error: type[ServerError]
):
    sampler = ScriptedSampler(*script)
    reply = sampling_of(sampler, engine_return_s=-1.0)
    with pytest.raises(error):
        await taken(reply)
    assert reply.not_moved is NotMoved.NO_ENGINE
    assert reply.segments.num_sampled == 1


async def test_a_reply_that_never_began_has_not_failed_to_move():
    sampler = ScriptedSampler(DEATH, DEATH, DEATH)
    reply = sampling_of(sampler)
    with pytest.raises(ServerError):
        await taken(reply)
    assert reply.not_moved is None
    assert len(sampler.requests) == 3


async def test_each_token_has_all_its_tries():
    """Of more deaths than tries none ends the reply, as long as tokens come."""
    deaths = [step for token in range(30, 36) for step in (token, DEATH, DEATH)]
    sampler = ScriptedSampler(*deaths, 36)
    reply = sampling_of(sampler)
    assert await taken(reply) == list(range(30, 37))
    assert reply.segments.num_segments == 7
