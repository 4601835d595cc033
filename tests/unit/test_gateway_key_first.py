"""A request's key is checked before its body is read, on every route and at every
worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fakes import FakeEngine, random_reply
from gateway_workers import Workers
from running_gateway import ENV_KEY, Running, running

from invrl.gateway.rendering.renderer import Renderer

DECLARED = 16_000_000
"""Bytes that a request announces and never sends: who answers has not waited for
them."""
OF_THE_ENVIRONMENT = ("/tasks/lease", "/sessions")
OF_A_SESSION = ("children", "reward", "finish", "abort")
OF_AN_AGENT = (
    "chat/completions",
    "completions",
    "responses",
    "messages",
    "messages/count_tokens",
    "models/tiny:generateContent",
    "models/tiny:countTokens",
)


async def status_of_head(url: str, path: str, key: str) -> int:
    """The status that a request gets whose head arrives and whose body never does."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json"]
    head += [f"content-length: {DECLARED}", f"authorization: Bearer {key}"]
    writer.write("\r\n".join([*head, "", ""]).encode())
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    # Longer than the test waits: a 408 would mean that the body was waited for.
    async with running(
        tmp_path, model, renderer, body_timeout_s=300
    ) as patient_gateway:
        yield patient_gateway


@pytest.mark.parametrize("path", OF_THE_ENVIRONMENT)
async def test_environment_key_is_checked_before_the_body_is_read(
    gateway: Running, path: str
):
    [session] = await gateway.open()
    for key in ("", "env-guess-guess-guess", session.key):
        assert await status_of_head(gateway.url, path, key) == 401


@pytest.mark.parametrize("name", OF_A_SESSION)
async def test_session_key_is_checked_before_the_body_is_read(
    gateway: Running, name: str
):
    mine, other = await gateway.open(members=2)
    for key in ("", "isk-00" + "A" * 32, other.key):
        assert (
            await status_of_head(gateway.url, f"/sessions/{mine.id}/{name}", key) == 401
        )
    assert (
        await status_of_head(gateway.url, f"/sessions/ses-00ff/{name}", ENV_KEY) == 404
    )


@pytest.mark.parametrize("owner", [0, 1])
async def test_no_worker_reads_a_body_without_a_key(
    tmp_path: Path, model: Path, renderer: Renderer, owner: int
):
    async with (
        FakeEngine(random_reply()) as engine,
        httpx.AsyncClient(timeout=120) as http,
    ):
        both = Workers(engine, http, tmp_path)
        try:
            for number in range(2):
                await both.start(number, model, renderer, body_timeout_s=300)
            [session] = await both.at[owner].open()
            guess = f"isk-0{owner}" + "A" * (len(session.key) - 6)
            near = session.key[:-1] + ("A" if session.key[-1] != "A" else "B")
            for asked in both.urls:
                for key in (guess, near):
                    for path in OF_AN_AGENT:
                        assert (
                            await status_of_head(asked, f"/s/{key}/v1/{path}", "x")
                            == 401
                        )
                        assert await status_of_head(asked, f"/v1/{path}", key) == 401
                for key in ("", guess, near):
                    for path in OF_THE_ENVIRONMENT:
                        assert await status_of_head(asked, path, key) == 401
                    for name in OF_A_SESSION:
                        assert (
                            await status_of_head(
                                asked, f"/sessions/{session.id}/{name}", key
                            )
                            == 401
                        )
        finally:
            await both.stop()
