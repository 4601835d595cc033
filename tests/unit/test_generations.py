"""What becomes of a turn whose generation, or whose commit, does not go as it
should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakes import EngineDeaths
from running_gateway import (
    ASK,
    MORE,
    Running,
    eventually,
    running,
)
from streamed import generate

from invrl.engines.client.generation import GenerateEnd, GenerateRequest
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.errors import NoEngineError, ServerError
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.turns import reply_sampling
from invrl.host.network.ports import free_port
from invrl.types.sessions import Sampling


async def test_a_reply_to_another_prompt_is_an_error_and_never_trained(
    gateway: Running,
):
    """The engine says how many tokens it has read; they were not those that were
    sent."""
    gateway.engine.prompt_tokens_added = 1
    [session] = await gateway.open()
    with pytest.raises(openai.APIError, match="consumed"):
        await gateway.client(session).chat.completions.create(
            model="tiny", messages=[ASK]
        )
    assert gateway.turns(session) == []


async def test_what_was_aborted_is_never_continued(
    gateway: Running, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reply_sampling, "_RETRY_PAUSES_S", ())
    gateway.engine.holds = EngineDeaths(gateway.engine, 4)
    [session] = await gateway.open()
    create = gateway.client(session).chat.completions.create
    with pytest.raises(openai.APIError, match="closed the connection"):
        await read(await create(model="tiny", messages=[ASK], stream=True))
    await eventually(lambda: len(gateway.turns(session)) == 1)
    [aborted] = gateway.turns(session)
    assert aborted.finish_reason == "abort"
    assert len(aborted.sampled_ids_T) == 3
    reply = {
        "role": "assistant",
        "content": renderer.reply_text(aborted.sampled_ids_T.tolist()),
    }
    await create(model="tiny", messages=[ASK, reply, MORE])
    assert gateway.turns(session)[-1].parent_id is None


async def read(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_a_reply_is_whole_only_when_its_turn_is_in_the_store(
    gateway: Running, tmp_path: Path
):
    [session] = await gateway.open()
    with contextlib.closing(
        sqlite3.connect(tmp_path / "run.db", isolation_level=None)
    ) as other_process:
        other_process.execute("BEGIN IMMEDIATE")
        call = asyncio.create_task(
            gateway.client(session).chat.completions.create(
                model="tiny", messages=[ASK]
            )
        )
        await eventually(lambda: gateway.engine.replies and not gateway.engine.running)
        done, _ = await asyncio.wait([call], timeout=1.0)
        assert not done
        other_process.execute("ROLLBACK")
    await call
    assert len(gateway.turns(session)) == 1


async def test_a_request_waits_while_the_router_has_no_engine(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reply_sampling, "_ENGINE_POLL_S", 0.01)
    sample = SglangClient.stream
    asked: list[str] = []

    def stream(client: SglangClient, request: GenerateRequest):
        asked.append(request.rid)
        if len(asked) < 20:
            raise NoEngineError("the router answered /generate with 503")
        return sample(client, request)

    monkeypatch.setattr(SglangClient, "stream", stream)
    [session] = await gateway.open()
    await gateway.client(session).chat.completions.create(model="tiny", messages=[ASK])
    assert len(set(asked)) == 20, "an engine may know an id that it has seen"
    [turn] = gateway.turns(session)
    assert turn.id == asked[0]


async def test_a_request_waits_for_an_engine_until_a_deadline(
    tmp_path: Path, model: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reply_sampling, "_ENGINE_POLL_S", 0.01)

    def stream(client: SglangClient, request: GenerateRequest):
        raise NoEngineError("no engine is there")

    monkeypatch.setattr(SglangClient, "stream", stream)
    async with running(tmp_path, model, renderer, engine_return_s=0.1) as gateway:
        [session] = await gateway.open()
        with pytest.raises(openai.APIError, match="no engine is there"):
            await gateway.client(session).chat.completions.create(
                model="tiny", messages=[ASK]
            )


async def test_a_connection_that_breaks_behind_the_last_token_loses_nothing():
    async def answer(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        meta = {
            "id": "a",
            "finish_reason": {"type": "length"},
            "prompt_tokens": 1,
            "completion_tokens": 1,
            "weight_versions": [{"version": "0", "start": 0, "end": 1}],
            "output_token_logprobs": [[-0.5, 7, None]],
        }
        event = json.dumps({"output_ids": [7], "meta_info": meta})
        await response.write(f"data: {event}\n\n".encode())
        raise ConnectionResetError("the engine died")

    app = web.Application()
    app.router.add_post("/generate", answer)
    limits = EngineLimits(vocab_size=512, context_length=1024)
    request = GenerateRequest(
        rid="a",
        input_ids_T=np.array([1], np.int32),
        sampling=Sampling(max_new_tokens=1),
    )
    async with (
        TestServer(app) as engine,
        SglangClient(str(engine.make_url("")), limits=limits) as client,
    ):
        chunk, end = [item async for item in client.stream(request)]
    assert chunk.spans == end.spans
    assert isinstance(end, GenerateEnd)
    assert end.finish_reason == "length"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, None, NoEngineError),
        (503, "no_available_workers", NoEngineError),
        (404, "model_not_found", NoEngineError),
        (500, "call_upstream_request_error", NoEngineError),
        (500, "call_upstream_connection_failed", NoEngineError),
        (504, "call_upstream_timeout", ServerError),
        (404, None, ServerError),
        (500, None, ServerError),
    ],
)
async def test_a_request_that_no_engine_got_is_told_from_one_that_an_engine_failed(
    status: int, code: str | None, kind: type[ServerError]
):
    async def answer(_: web.Request) -> web.Response:
        headers = {"X-SMG-Error-Code": code} if code else {}
        return web.Response(status=status, headers=headers)

    app = web.Application()
    app.router.add_post("/generate", answer)
    limits = EngineLimits(vocab_size=512, context_length=1024)
    request = GenerateRequest(
        rid="a",
        input_ids_T=np.array([1], np.int32),
        sampling=Sampling(max_new_tokens=1),
    )
    async with (
        TestServer(app) as router,
        SglangClient(str(router.make_url("")), limits=limits) as client,
    ):
        with pytest.raises(ServerError) as raised:
            await generate(client, request)
    assert type(raised.value) is kind


async def test_a_router_that_is_away_is_waited_for_like_an_engine():
    limits = EngineLimits(vocab_size=512, context_length=1024)
    request = GenerateRequest(
        rid="a",
        input_ids_T=np.array([1], np.int32),
        sampling=Sampling(max_new_tokens=1),
    )
    url = f"http://127.0.0.1:{free_port()}"
    async with SglangClient(url, limits=limits) as client:
        with pytest.raises(NoEngineError, match="cannot connect"):
            await generate(client, request)
