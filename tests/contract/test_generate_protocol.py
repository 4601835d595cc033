"""`/generate` as the gateway uses it: the same expectations of the fake engine, of the
scripted one, and of real SGLang behind the real routers."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engine_tap import EngineTap
from fakes import FakeEngine, reply_by_prompt
from numpy.typing import NDArray
from scripted_engine import ScriptedEngine, text_by_prompt
from streamed import collect, generate
from tokenizers import Tokenizer

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateRequest,
)
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.inside_sglang.engine_instance import INSTANCE_HEADER
from invrl.engines.router.router_server import RouterServer
from invrl.errors import ServerError, SessionError
from invrl.types.sessions import Sampling
from invrl.types.turns import VersionSpan
from invrl.types.weights import WeightVersion

END = 2
PROMPT = [5, 6, 7, 8]
SERVERS = (
    "fake",
    "scripted",
    "scripted behind a tap",
    "real",
    "real behind smg",
)
STAND_IN_LIMITS = EngineLimits(vocab_size=512, context_length=2048)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fleet(request: pytest.FixtureRequest, server: str) -> Fleet | None:
    """None where a stand-in replies."""
    if server.startswith("real"):
        return request.getfixturevalue("tiny_fleet")
    return None


@pytest.fixture
def router(
    request: pytest.FixtureRequest,
    server: str,
    fleet: Fleet | None,
) -> RouterServer | None:
    """In front of the real fleet."""
    if server == "real behind smg":
        return request.getfixturevalue("smg_router")
    if fleet is None:
        return None
    return fleet.router


@pytest.fixture
async def stand_in(
    server: str,
    fleet: Fleet | None,
    tiny_model: Path,
) -> AsyncIterator[FakeEngine | None]:
    """None where the fleet is real."""
    if fleet is not None:
        yield None
        return
    engine: FakeEngine
    if server == "fake":
        engine = FakeEngine(reply_by_prompt(tokens=100))
    else:
        engine = ScriptedEngine(text_by_prompt, tiny_model)
    async with engine:
        yield engine


@pytest.fixture
async def url(
    server: str,
    router: RouterServer | None,
    stand_in: FakeEngine | None,
) -> AsyncIterator[str]:
    if router is not None:
        yield router.url
        return
    assert stand_in is not None
    if not server.endswith("tap"):
        yield stand_in.url
        return
    async with EngineTap(stand_in.url) as tap:
        yield tap.url


@pytest.fixture
async def client(
    url: str,
    fleet: Fleet | None,
    router: RouterServer | None,
) -> AsyncIterator[SglangClient]:
    key = ""
    limits = STAND_IN_LIMITS
    if router is not None:
        key = router.api_key
    if fleet is not None:
        limits = fleet.limits
    connection = SglangClient(url, limits=limits, api_key=key)
    async with connection:
        yield connection


def ask(
    prompt: list[int],
    *,
    tokens: int = 6,
    **changes,
) -> GenerateRequest:
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


def greedy(*, tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_new_tokens=tokens)


def random_prompt(length: int) -> list[int]:
    """Ids of ordinary tokens, which no cache has seen."""
    return [20 + secrets.randbelow(400) for _ in range(length)]


def assert_spans_cover(
    spans: tuple[VersionSpan, ...],
    length: int,
) -> None:
    """Every token has one version: the spans leave no gap and do not overlap."""
    start = 0
    for span in spans:
        assert span.start == start
        start = span.end
    assert start == length


def versions_of(spans: tuple[VersionSpan, ...]) -> NDArray[np.int32]:
    """One per token."""
    versions: list[int] = []
    for span in spans:
        length = span.end - span.start
        versions += [span.version] * length
    return np.array(versions, np.int32)


async def current_version(fleet: Fleet | None) -> int:
    """A stand-in begins with version 0."""
    if fleet is None:
        return 0
    [engine] = fleet.engines.values()
    return int(await engine.client.weight_version())


async def rename(
    fleet: Fleet | None,
    stand_in: FakeEngine | None,
    version: int,
) -> None:
    """Give the engine's weights a new version while it generates."""
    if fleet is None:
        assert stand_in is not None
        stand_in.version = version
        return
    [engine] = fleet.engines.values()
    await engine.client.name_weights(WeightVersion(version))


async def test_a_reply_has_ids_logprobs_and_versions(
    client: SglangClient,
):
    request = ask(random_prompt(40))
    result = await generate(client, request)
    assert result.finish_reason == "length"
    assert result.matched_stop is None
    assert len(result.ids_T) == 6
    assert len(result.logprobs_T) == 6
    assert result.ids_T.dtype == np.int32
    assert result.logprobs_T.dtype == np.float32
    assert np.all(result.logprobs_T <= 0)
    assert_spans_cover(result.spans, 6)


async def test_pieces_join_to_the_whole_reply(
    client: SglangClient,
):
    """SGLang makes one piece of tokens that its HTTP process was late for, so that they
    are fewer on a busy machine."""
    request = ask(PROMPT, tokens=90)
    chunks, result = await collect(client.stream(request))
    assert len(chunks) >= 4
    num_tokens = 0
    for chunk in chunks:
        num_new_tokens = len(chunk.ids_T)
        assert num_new_tokens > 0
        assert num_new_tokens == len(chunk.logprobs_T)
        num_tokens += num_new_tokens
        assert_spans_cover(chunk.spans, num_tokens)
    assert num_tokens == 90
    assert_spans_cover(result.spans, 90)
    assert result.finish_reason == "length"


async def test_every_piece_has_the_name_of_its_engine(
    client: SglangClient,
    stand_in: FakeEngine | None,
):
    if stand_in is not None:
        stand_in.headers = {INSTANCE_HEADER: "engine-0.of-a-stand-in"}
    chunks, result = await collect(client.stream(ask(PROMPT)))
    [engine] = {chunk.engine for chunk in chunks}
    assert engine == result.engine
    assert engine is not None
    assert engine.startswith("engine-0.")


async def test_an_event_has_as_many_tokens_as_its_request_says(
    client: SglangClient,
):
    request = ask(PROMPT, tokens=90, stream_interval=32)
    chunks, result = await collect(client.stream(request))
    ends = np.cumsum([len(chunk.ids_T) for chunk in chunks]).tolist()
    assert set(ends) <= {1, 33, 65, 90}
    assert len(ends) >= 2
    assert ends[-1] == 90
    assert_spans_cover(result.spans, 90)


async def test_every_piece_of_a_stream_has_the_exact_weight_versions_so_far(
    client: SglangClient,
    fleet: Fleet | None,
    stand_in: FakeEngine | None,
):
    """So the tokens of a stream that breaks off have exact versions, too."""
    old = await current_version(fleet)
    new = old + 1
    num_tokens = 1500
    if stand_in is not None:
        num_tokens = 90
        stand_in.holds = lambda count: count > 40 and stand_in.version == old
    request = ask(PROMPT, tokens=num_tokens)
    stream = client.stream(request)
    try:
        first_chunk = await anext(stream)
        await rename(fleet, stand_in, new)
        later_chunks, result = await collect(stream)
    finally:
        await rename(fleet, stand_in, old)
    assert isinstance(first_chunk, GenerateChunk)

    exact_T = versions_of(result.spans)
    assert set(exact_T.tolist()) == {old, new}
    assert np.all(np.diff(exact_T) >= 0)
    num_sampled = 0
    for chunk in (first_chunk, *later_chunks):
        num_sampled += len(chunk.ids_T)
        assert versions_of(chunk.spans).tolist() == exact_T[:num_sampled].tolist()


@pytest.mark.parametrize("after", [1, 7])
async def test_a_reply_that_another_request_continues_is_the_whole_reply(
    client: SglangClient,
    server: str,
    after: int,
):
    if not server.startswith("real"):
        pytest.skip("the replies of stand-ins depend on the whole prompt")
    sampling = greedy(tokens=12)
    whole = await generate(client, ask(PROMPT, sampling=sampling))
    ids = whole.ids_T.tolist()
    rest = await generate(
        client, ask([*PROMPT, *ids[:after]], sampling=greedy(tokens=12 - after))
    )
    assert [*ids[:after], *rest.ids_T.tolist()] == ids
    logprobs_T = np.concatenate([whole.logprobs_T[:after], rest.logprobs_T])
    assert logprobs_T == pytest.approx(whole.logprobs_T, abs=1e-3)


@pytest.mark.parametrize("interval", [None, 32])
async def test_end_token_ends_the_reply_and_is_part_of_it(
    client: SglangClient,
    interval: int | None,
):
    sampling = greedy(tokens=4)
    unstopped = await generate(client, ask(PROMPT, sampling=sampling))
    end = int(unstopped.ids_T[0])
    request = ask(
        PROMPT,
        sampling=sampling,
        stop_token_ids=(end,),
        ignore_eos=False,
        stream_interval=interval,
    )
    result = await generate(client, request)
    assert result.finish_reason == "stop"
    assert result.matched_stop == end
    assert result.ids_T.tolist() == [end]


@pytest.mark.parametrize("interval", [None, 32])
async def test_stop_string_ends_the_reply_with_the_token_that_completes_it(
    client: SglangClient,
    server: str,
    tiny_model: Path,
    interval: int | None,
):
    if server == "fake":
        pytest.skip("the fake engine knows no text")
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    sampling = greedy(tokens=20)
    unstopped = await generate(client, ask(PROMPT, sampling=sampling))
    unstopped_ids = unstopped.ids_T.tolist()
    stops = [
        character
        for character in text(unstopped_ids)[2:]
        if character.isascii() and character.isprintable()
    ]
    if not stops:
        pytest.skip("this random model says nothing printable")
    stop = stops[0]

    request = ask(
        PROMPT,
        sampling=sampling,
        stop=(stop,),
        stream_interval=interval,
    )
    result = await generate(client, request)
    assert result.finish_reason == "stop"
    assert result.matched_stop == stop
    ids = result.ids_T.tolist()
    assert ids == unstopped_ids[: len(ids)]
    assert stop in text(ids)
    assert stop not in text(ids[:-1])


@pytest.mark.parametrize("interval", [None, 32])
async def test_greedy_sampling_takes_the_first_of_the_top_tokens(
    client: SglangClient,
    interval: int | None,
):
    """Where sampling is greedy, the first of them is what was sampled, with the same
    log-prob."""
    request = ask(
        PROMPT,
        sampling=greedy(tokens=6),
        top_logprobs=3,
        stream_interval=interval,
    )
    result = await generate(client, request)
    top = result.top.reshape(6, 3)
    top_ids = top["id"]
    top_logprobs = top["logprob"]
    assert top_ids[:, 0].tolist() == result.ids_T.tolist()
    assert top_logprobs[:, 0].tolist() == result.logprobs_T.tolist()
    assert np.all(np.diff(top_logprobs) <= 0)
    for ids in top_ids.tolist():
        assert len(set(ids)) == 3


async def test_reply_has_no_top_tokens_unless_they_are_wanted(
    client: SglangClient,
):
    result = await generate(client, ask([5], tokens=1))
    assert result.top.size == 0


async def test_continued_path_is_read_from_the_cache(
    client: SglangClient,
):
    prompt = random_prompt(60)
    first = await generate(client, ask(prompt))
    continued = [*prompt, *first.ids_T.tolist(), *PROMPT]
    second = await generate(client, ask(continued))
    assert first.cached_tokens < 8
    assert 60 <= second.cached_tokens < 70


async def test_closing_a_stream_ends_its_generation(
    client: SglangClient,
):
    stream = client.stream(ask([5, 6, 7], tokens=1500))
    async with contextlib.aclosing(stream):
        await anext(stream)
    result = await generate(client, ask([5, 6, 7], tokens=2))
    assert len(result.ids_T) == 2


async def test_request_that_would_kill_an_engine_is_refused(
    client: SglangClient,
):
    longest = client.limits.context_length
    too_long = [5] * (longest - 99)
    for request in (
        ask([512], tokens=1),
        ask([-1], tokens=1),
        ask([], tokens=1),
        ask([5], tokens=0),
        ask(too_long, tokens=100),
    ):
        with pytest.raises(SessionError) as caught:
            await generate(client, request)
        assert caught.value.status == 400
    result = await generate(client, ask([5]))
    assert result.finish_reason == "length"


async def test_unreachable_engine_is_a_server_error():
    client = SglangClient(
        "http://127.0.0.1:9",
        limits=STAND_IN_LIMITS,
    )
    request = ask([5])
    async with client:
        with pytest.raises(ServerError):
            await generate(client, request)
