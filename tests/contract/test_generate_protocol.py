"""`/generate` as the gateway uses it: the same expectations of the fake engine, of the
scripted one, and of real SGLang behind the real routers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engine_tap import EngineTap
from fakes import FakeEngine, reply_by_prompt
from numpy.typing import NDArray
from scripted_engine import ScriptedEngine, text_by_prompt
from streamed import collect
from tokenizers import Tokenizer

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
)
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.client.version_spans import EngineSpan, VersionTracker
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.router.router_server import RouterServer
from invrl.errors import ServerError, SessionError
from invrl.types.sessions import Sampling
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

END = 2


@pytest.fixture(
    params=["fake", "scripted", "scripted behind a tap", "real", "real behind smg"]
)
def server(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fleet(request: pytest.FixtureRequest, server: str) -> Fleet | str:
    """The real fleet, or the name of a stand-in."""
    if not server.startswith("real"):
        return server
    return request.getfixturevalue("tiny_fleet")


@pytest.fixture
def router(
    request: pytest.FixtureRequest, server: str, fleet: Fleet | str
) -> RouterServer | None:
    """In front of the real fleet."""
    if server == "real behind smg":
        return request.getfixturevalue("smg_router")
    return fleet.router if isinstance(fleet, Fleet) else None


@pytest.fixture
async def engine(
    fleet: Fleet | str, tiny_model: Path
) -> AsyncIterator[FakeEngine | None]:
    """The stand-in; None where the fleet is real."""
    if isinstance(fleet, Fleet):
        yield None
        return
    stand_in: FakeEngine = ScriptedEngine(text_by_prompt, tiny_model)
    if fleet == "fake":
        stand_in = FakeEngine(reply_by_prompt(tokens=100))
    async with stand_in as engine:
        yield engine


@pytest.fixture
async def client(
    fleet: Fleet | str, router: RouterServer | None, engine: FakeEngine | None
) -> AsyncIterator[SglangClient]:
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(fleet, Fleet):
            assert router is not None
            url = router.url
            key = router.api_key
            limits = fleet.limits
        else:
            assert engine is not None
            url = engine.url
            key = ""
            limits = EngineLimits(vocab_size=512, context_length=2048)
            if fleet.endswith("tap"):
                url = (await stack.enter_async_context(EngineTap(url))).url
        yield await stack.enter_async_context(
            SglangClient(url, limits=limits, api_key=key)
        )


def ask(prompt: list[int], *, tokens: int = 6, **changes) -> GenerateRequest:
    values = {
        "rid": secrets.token_hex(8),
        "input_ids_T": np.array(prompt, np.int32),
        "sampling": Sampling(max_new_tokens=tokens),
        "stop_token_ids": (END,),
        "routing_key": "session",
        "ignore_eos": True,  # never the end token by chance
        **changes,
    }
    return GenerateRequest(**values)


async def reply(
    client: SglangClient, request: GenerateRequest, *, stream: bool
) -> GenerateResult:
    if not stream:
        return await client.generate(request)
    _, result = await collect(client.stream(request))
    return result


def tiles(spans: tuple[VersionSpan, ...], length: int) -> bool:
    ends = [span.end for span in spans]
    return [span.start for span in spans] == [0, *ends[:-1]] and ends[-1] == length


async def test_a_whole_reply_has_ids_logprobs_and_versions(client: SglangClient):
    prompt = [secrets.randbelow(400) + 20 for _ in range(40)]
    result = await client.generate(ask(prompt))
    assert result.prompt_tokens == 40
    assert result.finish_reason == "length"
    assert result.matched_stop is None
    assert len(result.ids_T) == len(result.logprobs_T) == 6
    assert result.ids_T.dtype == np.int32
    assert result.logprobs_T.dtype == np.float32
    assert np.all(result.logprobs_T <= 0)
    assert tiles(result.spans, 6)


async def test_stream_pieces_join_to_the_whole_reply(client: SglangClient):
    """SGLang makes one piece of tokens that its HTTP process was late for, so that they
    are fewer on a busy machine."""
    chunks, result = await collect(client.stream(ask([5, 6, 7, 8], tokens=90)))
    assert len(chunks) >= 4
    seen = 0
    for chunk in chunks:
        assert 0 < len(chunk.ids_T) == len(chunk.logprobs_T)
        seen += len(chunk.ids_T)
        assert tiles(chunk.spans, seen)
    assert tiles(result.spans, 90)
    assert seen == 90
    assert result.finish_reason == "length"
    assert result.prompt_tokens == 4


async def rename(fleet: Fleet | str, engine: FakeEngine | None, version: int) -> None:
    """The engine's weights are called `version` from here on; what runs goes on."""
    if isinstance(fleet, Fleet):
        [real] = fleet.engines.values()
        await real.client.name_weights(WeightVersion(version))
    else:
        assert engine is not None
        engine.version = version


async def test_weight_versions_are_only_in_the_last_event_of_a_stream(
    client: SglangClient, fleet: Fleet | str, engine: FakeEngine | None
):
    """Before it each event has the version that the engine has when it is sent, and
    tokens that break off are recorded with versions that are none too new."""
    labelled = []
    told = []
    add = VersionTracker.add

    def tapped(
        self: VersionTracker,
        label: str,
        sampled: int,
        spans: Sequence[EngineSpan] | None,
    ) -> None:
        labelled.append((label, sampled))
        told.append(spans)
        add(self, label, sampled, spans)

    old = 0
    if isinstance(fleet, Fleet):
        [real] = fleet.engines.values()
        old = int(await real.client.weight_version())
    elif engine is not None:
        engine.holds = lambda count: count > 40 and engine.version == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VersionTracker, "add", tapped)
        stream = client.stream(ask([5, 6, 7, 8], tokens=1500 if engine is None else 90))
        try:
            first = await anext(stream)
            await rename(fleet, engine, old + 1)
            rest, end = await collect(stream)
        finally:
            await rename(fleet, engine, old)
    assert isinstance(first, GenerateChunk)
    assert [spans is None for spans in told] == [True] * (len(told) - 1) + [False]
    exact = versions(end.spans)
    assert set(exact.tolist()) == {old, old + 1}
    assert np.all(np.diff(exact) >= 0)
    labels = np.repeat(
        [int(label) for label, _ in labelled], [sampled for _, sampled in labelled]
    )
    assert np.all(labels >= exact)
    for chunk in (first, *rest):
        recorded = versions(chunk.spans)
        assert np.all(recorded <= exact[: len(recorded)])
    recorded = versions(rest[-2].spans)
    assert set(recorded.tolist()) == {old, old + 1}


def versions(spans: tuple[VersionSpan, ...]) -> NDArray[np.int32]:
    """One per token."""
    return np.concatenate(
        [np.full(span.end - span.start, span.version, np.int32) for span in spans]
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_end_token_ends_the_reply_and_is_part_of_it(
    client: SglangClient, stream: bool
):
    greedy = Sampling(temperature=0.0, max_new_tokens=4)
    free = await client.generate(ask([5, 6, 7, 8], sampling=greedy))
    end = int(free.ids_T[0])
    request = ask(
        [5, 6, 7, 8], sampling=greedy, stop_token_ids=(end,), ignore_eos=False
    )
    result = await reply(client, request, stream=stream)
    assert result.finish_reason == "stop"
    assert result.matched_stop == end
    assert result.ids_T.tolist() == [end]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_reply_with_the_token_that_completes_it(
    client: SglangClient, fleet: Fleet | str, tiny_model: Path, stream: bool
):
    if fleet == "fake":
        pytest.skip("the fake engine knows no text")
    text = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).decode
    greedy = Sampling(temperature=0.0, max_new_tokens=20)
    ids = (await client.generate(ask([5, 6, 7, 8], sampling=greedy))).ids_T.tolist()
    shown = text(ids, skip_special_tokens=False)
    stop = next((one for one in shown[2:] if one.isascii() and one.isprintable()), None)
    if stop is None:
        pytest.skip("this random model says nothing printable")
    request = ask([5, 6, 7, 8], sampling=greedy, stop=(stop,))
    result = await reply(client, request, stream=stream)
    assert (result.finish_reason, result.matched_stop) == ("stop", stop)
    sampled_ids = result.ids_T.tolist()
    assert sampled_ids == ids[: len(sampled_ids)]
    assert stop in text(sampled_ids, skip_special_tokens=False)
    assert stop not in text(sampled_ids[:-1], skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_greedy_sampling_takes_the_first_of_the_top_tokens(
    client: SglangClient, stream: bool
):
    """Where sampling is greedy, the first of them is what was sampled, with the same
    log-prob."""
    greedy = Sampling(temperature=0.0, max_new_tokens=6)
    request = ask([5, 6, 7, 8], sampling=greedy, top_logprobs=3)
    result = await reply(client, request, stream=stream)
    top = result.top.reshape(6, 3)
    assert top["id"][:, 0].tolist() == result.ids_T.tolist()
    assert top["logprob"][:, 0].tolist() == result.logprobs_T.tolist()
    assert np.all(np.diff(top["logprob"]) <= 0)
    assert [len(set(row)) for row in top["id"].tolist()] == [3] * 6
    assert (await client.generate(ask([5], tokens=1))).top.size == 0


async def test_continued_path_is_read_from_the_cache(client: SglangClient):
    prompt = [secrets.randbelow(400) + 20 for _ in range(60)]
    first = await client.generate(ask(prompt))
    second = await client.generate(ask([*prompt, *first.ids_T.tolist(), 5, 6, 7, 8]))
    assert first.cached_tokens < 8
    assert 60 <= second.cached_tokens < second.prompt_tokens == 70


async def test_closing_a_stream_ends_its_generation(client: SglangClient):
    async with contextlib.aclosing(client.stream(ask([5, 6, 7], tokens=1500))) as items:
        async for _ in items:
            break
    result = await client.generate(ask([5, 6, 7], tokens=2))
    assert len(result.ids_T) == 2


async def test_request_that_would_kill_an_engine_is_refused(client: SglangClient):
    longest = client.limits.context_length
    for prompt, tokens in (
        ([512], 1),
        ([-1], 1),
        ([], 1),
        ([5], 0),
        ([5] * (longest - 99), 100),
    ):
        with pytest.raises(SessionError) as caught:
            await client.generate(ask(prompt, tokens=tokens))
        assert caught.value.status == 400
    assert (await client.generate(ask([5]))).prompt_tokens == 1


async def test_unreachable_engine_is_a_server_error():
    limits = EngineLimits(vocab_size=512, context_length=2048)
    async with SglangClient("http://127.0.0.1:9", limits=limits) as client:
        with pytest.raises(ServerError):
            await client.generate(ask([5]))
        with pytest.raises(ServerError):
            await anext(client.stream(ask([5])))
