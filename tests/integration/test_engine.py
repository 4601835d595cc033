"""One real engine: token ids in and out, refusals that save its life, keys, and errors
one can read."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import time
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from slow_cases import first_quick
from streamed import collect, generate
from tiny_model import make_tiny_model
from torch_trainer import TorchSender

from invrl.engines.client.generation import GenerateChunk, GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.engine_health import QUESTIONS, Updated, engine_death
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.inside_sglang.atomic_weight_load import WEIGHT_LOADER
from invrl.engines.inside_sglang.engine_routes import NAME_PATH, PAUSE_PATH
from invrl.engines.launch.engine_launcher import Engine
from invrl.engines.launch.engine_server import EngineServer
from invrl.errors import ServerError, SessionError
from invrl.gateway.turns.continuation import Segments
from invrl.host.output.log_lines import LogSettings
from invrl.host.processes.fork_parent import ForkParent
from invrl.types.sessions import Sampling
from invrl.weights.loader.loader_messages import LoaderRequest


@pytest.fixture
def engine(tiny_fleet: Fleet) -> Engine:
    return tiny_fleet.engines["engine-0"]


def request(
    ids: list[int], *, new: int = 8, rid: str = "", **fields
) -> GenerateRequest:
    return GenerateRequest(
        rid=rid or f"r{np.random.randint(1 << 40)}",
        input_ids_T=np.array(ids, np.int32),
        sampling=Sampling(max_new_tokens=new),
        **fields,
    )


async def test_streamed_and_whole_replies_have_the_same_shape(engine: Engine) -> None:
    whole = await generate(engine.client, request([1, 30, 40], new=9, ignore_eos=True))
    assert len(whole.ids_T) == 9
    assert len(whole.logprobs_T) == 9
    assert whole.finish_reason == "length"
    assert [(span.start, span.end) for span in whole.spans] == [(0, 9)]
    stream = engine.client.stream(request([1, 30, 40], new=200, ignore_eos=True))
    chunks, result = await collect(stream)
    assert len(chunks) > 1
    assert len(result.ids_T) == 200
    assert len(result.logprobs_T) == 200
    assert result.finish_reason == "length"
    assert [(span.start, span.end) for span in result.spans] == [(0, 200)]


async def test_connection_closed_by_the_server_is_not_reused(engine: Engine) -> None:
    """Idle for longer than the server keeps it, while our event loop stood still and
    saw nothing of it."""
    await generate(engine.client, request([1, 30, 40], new=1))
    time.sleep(7)
    assert len((await generate(engine.client, request([1, 30, 40], new=1))).ids_T) == 1


async def test_stop_token_ends_the_reply_and_is_reported(engine: Engine) -> None:
    found = None
    for _ in range(40):
        result = await generate(
            engine.client,
            request([1, 30], new=64, stop_token_ids=tuple(range(0, 512, 2))),
        )
        if result.finish_reason == "stop":
            found = result
            break
    assert found is not None
    # the stop token is among the sampled ones
    assert found.matched_stop == found.ids_T[-1]


async def test_longer_prompt_reuses_the_cached_prefix(engine: Engine) -> None:
    first = await generate(
        engine.client, request([9, 9, 8, 8, *range(60, 90)], new=10, ignore_eos=True)
    )
    whole = [9, 9, 8, 8, *range(60, 90), *first.ids_T.tolist(), 7]
    second = await generate(engine.client, request(whole, new=2))
    assert second.cached_tokens >= len(whole) - 3


async def test_prompt_logprobs_equal_the_hugging_face_models(
    engine: Engine, tiny_model: Path
) -> None:
    """Only while the engine holds the folder's weights; otherwise the weight tests
    prove the same."""
    if await engine.client.weight_version() != "0":
        pytest.skip(
            "the shared engine has been updated; test_weight_sync compares its canaries"
        )
    prompts = [[1, 40, 41, 300], [7, 8, 9, 10, 11, 400]]
    expected = await TorchSender(tiny_model).logprobs(prompts)
    for measured_T, expected_T in zip(
        await engine.client.prompt_logprobs(prompts), expected, strict=True
    ):
        assert np.abs(measured_T - expected_T).max() < 1e-4


@pytest.mark.parametrize(
    ("ids", "new", "code"),
    [
        ([1, 512], 4, "invalid_token_id"),
        ([1, -1], 4, "invalid_token_id"),
        ([], 4, "empty_prompt"),
        ([1] * 15_950, 100, "context_length_exceeded"),
        ([1], 0, "invalid_value"),
    ],
)
async def test_request_that_an_engine_would_die_of_or_cut_short_is_refused(
    engine: Engine, ids: list[int], new: int, code: str
) -> None:
    with pytest.raises(SessionError) as raised:
        await generate(engine.client, request(ids, new=new))
    assert (raised.value.status, raised.value.code) == (400, code)
    with pytest.raises(SessionError):
        async for _ in engine.client.stream(request(ids, new=new)):
            pass
    assert await engine.client.generates(deadline_s=60)


async def tokens_go_by(engine: Engine) -> None:
    """Whatever was asked before has got some, too: all that runs is stepped
    together."""
    for _ in range(3):
        await generate(engine.client, request([1, 7], new=4, ignore_eos=True))


async def test_abort_is_an_error_after_the_tokens_sampled_so_far(
    engine: Engine,
) -> None:
    chunks: list[GenerateChunk] = []

    async def read_and_abort() -> None:
        asked = request([1, 2, 3], new=1900, rid="to-abort", ignore_eos=True)
        async for item in engine.client.stream(asked):
            assert isinstance(item, GenerateChunk)
            if not chunks:
                await engine.client._control("/abort_request", {"rid": "to-abort"})
            chunks.append(item)

    with pytest.raises(ServerError, match="aborted"):
        await asyncio.wait_for(read_and_abort(), 120)
    num_tokens = sum(len(chunk.ids_T) for chunk in chunks)
    assert 0 < num_tokens < 1900
    assert chunks[-1].spans[-1].end == num_tokens


async def test_closing_a_stream_ends_the_generation(engine: Engine) -> None:
    stream = engine.client.stream(request([1, 2, 3], new=1900, ignore_eos=True))
    async for _ in stream:
        break
    await stream.aclose()
    for attempt in range(20):  # in which far fewer than 1900 tokens go by
        await tokens_go_by(engine)
        try:
            return await engine.client.flush_cache()  # refused while a request runs
        except ServerError:
            assert attempt < 19


async def test_continuation_outlives_the_abort_of_the_request_before_it(
    engine: Engine,
) -> None:
    """SGLang looks for the client of a request that has closed its connection, and
    aborts the request when it sees so: here after the continuation has begun."""
    asked = request([1, 2, 3], new=1900, ignore_eos=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(generate(engine.client, asked), 0.5)
    whole = await generate(engine.client, Segments(asked).restart())
    assert len(whole.ids_T) == 1900


@pytest.mark.parametrize(
    ("path", "key"),
    [("/generate", ""), ("/generate", "wrong")]
    + [
        (path, key)
        for path in (
            "/pause_generation",
            "/update_weights_from_tensor",
            "/update_weight_version",
            PAUSE_PATH,
            NAME_PATH,
        )
        for key in ("", "wrong", "sampling")
    ],
)
async def test_engine_answers_nothing_without_the_right_key(
    engine: Engine, path: str, key: str
) -> None:
    headers = {
        "Authorization": f"Bearer {engine.server.api_key if key == 'sampling' else key}"
    }
    async with (
        aiohttp.ClientSession() as http,
        http.post(engine.server.url + path, json={}, headers=headers) as response,
    ):
        assert response.status in (401, 403)


async def test_paused_engine_holds_requests_and_counts_as_healthy(
    tiny_fleet: Fleet, engine: Engine
) -> None:
    await engine.receiver.pause()
    try:
        assert engine.receiver.is_paused
        flight = asyncio.create_task(
            generate(engine.client, request([5, 6], new=3, ignore_eos=True))
        )
        await asyncio.sleep(0.5)
        assert not flight.done()
    finally:
        await engine.receiver.resume()
    assert len((await asyncio.wait_for(flight, 120)).ids_T) == 3
    assert not engine.receiver.is_paused
    assert "engine-0" in tiny_fleet.engines


class CountingClient:
    """The engine's client, with the questions counted that its scheduler has left
    open."""

    def __init__(self, client: SglangClient, enough: int) -> None:
        self._client = client
        self._enough = enough
        self._unanswered = 0
        self.silent = asyncio.Event()

    async def answers(self, *, deadline_s: float) -> bool:
        answered = await self._client.answers(deadline_s=deadline_s)
        self._unanswered += not answered
        if self._unanswered >= self._enough:
            self.silent.set()
        return answered

    async def generates(self, *, deadline_s: float) -> bool:
        return await self._client.generates(deadline_s=deadline_s)


class NeverLoading:
    is_paused = False
    is_loading = False


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_engine_loading_for_longer_than_a_heartbeat_is_not_dead(
    engine: Engine, tmp_path: Path
) -> None:
    """A call of the weight loader that does not end: it writes its reply into a pipe
    that nobody reads."""
    pipe = tmp_path / "reply"
    os.mkfifo(pipe)
    loader_request = msgspec.json.encode(
        LoaderRequest(reply_path=str(pipe), tensors=())
    )
    named = pickle.dumps([(loader_request.decode(), torch.empty(0))])
    receiver = engine.receiver

    async def load() -> None:
        await receiver._send([base64.b64encode(named).decode()], WEIGHT_LOADER)

    def death(client: CountingClient, updated: Updated) -> asyncio.Task[str]:
        processes = engine.server.processes()
        dying = engine_death(processes, client, updated, timeout_s=3.0, interval_s=0.2)
        return asyncio.create_task(dying)

    client = CountingClient(engine.client, enough=2 * QUESTIONS)
    loading = asyncio.create_task(load())
    dying = death(client, receiver)
    silent = asyncio.create_task(client.silent.wait())
    try:
        await asyncio.wait(
            {loading, dying, silent}, return_when=asyncio.FIRST_COMPLETED
        )
        assert client.silent.is_set()
        assert not dying.done()
        # What does not know of the load takes the same silence for death.
        reason = await death(
            CountingClient(engine.client, enough=QUESTIONS), NeverLoading()
        )
        assert "its scheduler has not answered for 3 s" in reason
        assert not dying.done()
    finally:
        for task in (dying, silent):
            task.cancel()
        await asyncio.wait({dying, silent})
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        await loading
        os.close(reader)
    assert not receiver.is_loading
    assert await engine.client.answers(deadline_s=300)


def test_engine_that_cannot_start_reports_the_reason(
    engine_parent: ForkParent, tmp_path: Path
) -> None:
    """Also in its log, in the lines of our own processes."""
    folder = make_tiny_model(tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no weights")
    log = LogSettings(run="some-run", format="json")
    server = EngineServer(
        "engine-x",
        EngineConfig(),
        model_path=folder,
        run_folder=tmp_path,
        log=log,
        parent=engine_parent,
    )
    try:
        with pytest.raises(ServerError, match=r"(?i)safetensor|header"):
            server.wait_ready()
    finally:
        server.stop()
    assert not server.alive()
    lines = [
        json.loads(line)
        for line in server.log.read_text().splitlines()
        if line.startswith("{")
    ]
    assert {line["run"] for line in lines} == {"some-run"}
    errors = [
        line
        for line in lines
        if line["process"] == "engine-x/scheduler" and line["level"] == "error"
    ]
    assert any("safetensor" in line["message"].lower() for line in errors), lines


@pytest.mark.parametrize(
    "name", first_quick(["sglang::scheduler", "sglang::detokenizer"])
)
def test_death_of_a_process_ends_the_engines_start(
    name: str, tiny_model: Path, engine_parent: ForkParent, tmp_path: Path
) -> None:
    """At once: SGLang's HTTP process, which lives on, took more than a minute to miss
    its detokenizer."""
    config = EngineConfig(dtype="float32", start_timeout_s=86_400.0)
    server = EngineServer(
        "engine-y",
        config,
        model_path=tiny_model,
        run_folder=tmp_path,
        parent=engine_parent,
    )
    try:
        while not (found := [p for p in server.processes() if p.name() == name]):
            time.sleep(0.01)
        found[0].kill()
        with pytest.raises(ServerError, match=r"ended") as raised:
            server.wait_ready()
    finally:
        server.stop()
    assert "engine-y" in str(raised.value)
