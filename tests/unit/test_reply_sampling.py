"""How long a reply in the middle waits for another engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateEnd,
    GenerateRequest,
    GenerateResult,
)
from invrl.errors import NoEngineError, ServerError
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns import reply_sampling
from invrl.gateway.turns.continuation import NotMoved
from invrl.gateway.turns.reply_sampling import ReplySampling
from invrl.types.sessions import Sampling
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

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        raise AssertionError("only streams are scripted")

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


def sampling_of(sampler: ScriptedSampler, *, engine_return_s: float) -> ReplySampling:
    request = GenerateRequest(
        rid="turn-1",
        input_ids_T=np.array([5, 6], np.int32),
        sampling=Sampling(max_new_tokens=8),
    )
    return ReplySampling(
        request,
        stream=True,
        sampler=sampler,
        text_stream=TextStream(lambda ids: "", ()),
        engine_return_s=engine_return_s,
    )


async def taken(reply: ReplySampling) -> list[int]:
    ids: list[int] = []
    await reply.run(lambda chunk: ids.extend(chunk.ids_T.tolist()))
    return ids


async def test_a_reply_waits_in_the_middle_while_there_is_no_engine():
    sampler = ScriptedSampler(30, 31, DEATH, *[NO_ENGINE] * 20, 32, 33)
    reply = sampling_of(sampler, engine_return_s=600.0)
    assert await taken(reply) == [30, 31, 32, 33]
    assert len(sampler.requests) == 22
    assert len({request.rid for request in sampler.requests}) == 22
    assert reply.segments.num_segments == 2
    assert reply.not_moved is None


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
    reply = sampling_of(sampler, engine_return_s=600.0)
    with pytest.raises(ServerError):
        await taken(reply)
    assert reply.not_moved is None
    assert len(sampler.requests) == 3


async def test_each_token_has_all_its_tries():
    """Of more deaths than tries none ends the reply, as long as tokens come."""
    deaths = [step for token in range(30, 36) for step in (token, DEATH, DEATH)]
    sampler = ScriptedSampler(*deaths, 36)
    reply = sampling_of(sampler, engine_return_s=600.0)
    assert await taken(reply) == list(range(30, 37))
    assert reply.segments.num_segments == 7
