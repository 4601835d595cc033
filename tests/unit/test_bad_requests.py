"""What no dialect may fall over, in each of them: a 4xx of the dialect's own shape, and
nothing sampled.

What is particular to one dialect's fields stands in its own test file."""

from __future__ import annotations

import asyncio
import json
import secrets
from asyncio import BaseEventLoop
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from running_gateway import ENV_KEY, Running, eventually, running
from sampling_routes import CHAT, ROUTES, Route
from slow_cases import first_quick
from slow_upload import CHUNKED, Upload

from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.http import http_protocol

every_route = pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path[1:])


def bodies(route: Route) -> Iterator[tuple[str, bytes]]:
    good = json.dumps(route.good).encode()
    yield "empty", b""
    yield "cut off", good[:-1]
    yield "two", good * 2
    yield "null", b"null"
    yield "list", b"[" + good + b"]"
    yield "number", b"1e999"
    yield "nul bytes", b"\x00" * 100
    yield "utf-16", good.decode().encode("utf-16")
    yield "not utf-8", good.replace(b"12*13", b"\xff\xfe")
    yield "half a surrogate", good.replace(b"12*13", b"\xed\xa0\x80")
    yield "half an escaped surrogate", good.replace(b"12*13", b"\\ud800")
    bombs = (b"[" * 500_000, b'{"a":' * 500_000, b"[" * 100_000 + b"]" * 100_000)
    for number, bomb in enumerate(bombs):
        yield f"bomb {number}", bomb
        yield (
            f"bomb {number} in an ignored field",
            good[:-1] + b', "metadata": ' + bomb + b"}",
        )
        yield f"bomb {number} in tools", good[:-1] + b', "tools": ' + bomb + b"}"
    changes = {
        **route.refused,
        "no model's name": {"model": 7},
        "stream": {"stream": "yes"},
    }
    if route.limit:
        for limit in (-1, 0, 1.5, "8", True, 1e300, [8]):
            changes[f"{route.limit} {limit!r}"[:40]] = {route.limit: limit}
    for name, change in changes.items():
        yield name, json.dumps({**route.good, **change}).encode()


@every_route
async def test_malformed_bodies_are_400(gateway: Running, route: Route):
    [session] = await gateway.open()
    for name, body in bodies(route):
        answer = await gateway.http.post(session.base_url + route.path, content=body)
        assert answer.status_code == 400, (name, answer.text)
        route.check(answer, 400)
    [serving] = await gateway.open(purpose="serve")
    unknown = await gateway.http.post(
        serving.base_url + route.path, json=route.good | {"model": "gpt-9"}
    )
    route.check(unknown, 404, "model_not_found")
    assert gateway.engine.requests == []
    good = await gateway.http.post(session.base_url + route.path, json=route.good)
    assert good.status_code == 200, good.text


@every_route
async def test_absurd_token_limit_is_bounded_by_the_session_limit(
    gateway: Running, route: Route
):
    if not route.limit:
        return
    [session] = await gateway.open(sampling={"max_new_tokens": 5})
    for limit in (10**9, 10**400):
        body = route.good | {route.limit: limit}
        answer = await gateway.http.post(session.base_url + route.path, json=body)
        assert answer.status_code == 200, answer.text
    assert [
        request["sampling_params"]["max_new_tokens"]
        for request in gateway.engine.requests
    ] == [5, 5]


@every_route
async def test_foreign_guessed_and_finished_session_keys_are_401(
    gateway: Running, route: Route
):
    mine, other = await gateway.open(members=2)
    url = gateway.url + "/v1" + route.path

    async def ask(path: str = url, **headers: str) -> httpx.Response:
        return await gateway.http.post(path, json=route.good, headers=headers)

    route.check(await ask(), 401)
    route.check(await ask(authorization=f"Bearer {ENV_KEY}"), 401, "invalid_api_key")
    both = await ask(authorization=f"Bearer {mine.key}", **{"x-api-key": other.key})
    route.check(both, 401, "conflicting_keys")
    route.check(
        await ask(mine.base_url + route.path, **{"x-api-key": other.key}),
        401,
        "conflicting_keys",
    )
    for key in (
        "",
        "isk-",
        mine.key[:-1],
        mine.key + "A",
        mine.key.upper(),
        "%00",
        "é" * 9,
        "x" * 30_000,
    ):
        at = f"{gateway.url}/s/{key or '%20'}/v1{route.path}"
        route.check(await ask(at), 401, "invalid_api_key")
    assert gateway.engine.requests == []
    assert (await ask(mine.base_url + route.path)).status_code == 200
    await gateway.finish(mine)
    route.check(await ask(mine.base_url + route.path), 401, "session_closed")
    assert gateway.turns(other) == []


async def test_ten_thousand_guessed_session_keys_are_401(gateway: Running):
    """2,000 at each route, on kept connections, while a session is open that none of
    them is of."""
    [session] = await gateway.open()
    # the guesses share all but the last 8 characters with a real key
    prefix = session.key[:-8]
    guessed = 0
    async with aiohttp.ClientSession() as http:

        async def guess(route: Route) -> None:
            nonlocal guessed
            content = json.dumps(route.good).encode()
            for number in range(2000):
                key = prefix + secrets.token_urlsafe(6)
                headers = (
                    {"x-api-key": key}
                    if number % 2
                    else {"authorization": f"Bearer {key}"}
                )
                async with http.post(
                    gateway.url + "/v1" + route.path, data=content, headers=headers
                ) as response:
                    assert response.status == 401
                    body = await response.json()
                assert body["error"]["type"] == "authentication_error"
                guessed += 1

        await asyncio.gather(*map(guess, ROUTES))
    assert guessed == 10_000
    assert gateway.engine.requests == []
    assert gateway.turns(session) == []


LONG = f"content-length: {2**40}"


@every_route
@pytest.mark.parametrize("head", first_quick([CHUNKED, LONG]))
async def test_body_of_a_hundred_megabytes_is_413(
    gateway: Running,
    route: Route,
    head: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """The answer comes while the body does, of which no more is held than a body may
    have."""
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.05)
    [session] = await gateway.open()
    upload = Upload()
    await upload.send(
        gateway.url, f"/s/{session.key}/v1{route.path}", head, pieces=1600
    )
    route.check(upload.answer(), 413, "request_too_large")


@every_route
async def test_endless_upload_is_408_and_its_connection_is_closed(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    route: Route,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_protocol, "_LINGER_S", 0.05)
    async with running(tmp_path, model, renderer) as gateway:
        [session] = await gateway.open()
    async with running(tmp_path, model, renderer, body_timeout_s=0.2) as gateway:
        upload = Upload()
        at = f"/s/{session.key}/v1{route.path}"
        async with asyncio.timeout(60):
            await upload.send(gateway.url, at, CHUNKED, pieces=10**9, pause_s=0.01)
        route.check(upload.answer(), 408, "timeout")


async def test_connection_stays_open_if_the_body_ends_after_its_refusal(
    gateway: Running,
    monkeypatch: pytest.MonkeyPatch,
):
    loop = asyncio.get_running_loop()
    lingering = list[asyncio.TimerHandle]()
    later = 3600.0

    def call_later(delay: float, *call: Any, **more: Any) -> asyncio.TimerHandle:
        made = BaseEventLoop.call_later(loop, delay, *call, **more)  # type: ignore[arg-type]
        lingering.extend([made] * (delay == later))
        return made

    monkeypatch.setattr(http_protocol, "_LINGER_S", later)
    monkeypatch.setattr(loop, "call_later", call_later)
    [session] = await gateway.open()
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def ask(key: str, body: bytes, *, first: int) -> int:
        """Status of the answer, which comes when `first` bytes of the body are
        there."""
        head = f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body[:first])
        upload = Upload()
        await upload.read(reader)
        writer.write(body[first:])
        return upload.status

    assert await ask("isk-guess", b" " * 200_000, first=100_000) == 401
    [closing] = lingering
    await eventually(closing.cancelled)
    good = json.dumps(CHAT).encode()
    assert await ask(session.key, good, first=len(good)) == 200
    writer.close()


# ----------------------------------------------------------------- sessions


async def test_invalid_rewards_and_rewards_for_other_sessions_are_refused(
    gateway: Running,
):
    """Twice is allowed: the last one wins, until the session is finished."""
    mine, other = await gateway.open(members=2)
    route = ROUTES[0]
    path = f"/sessions/{mine.id}/reward"
    headers = {
        "authorization": f"Bearer {mine.key}",
        "content-type": "application/json",
    }
    for raw in (
        b'{"reward": NaN}',
        b'{"reward": -Infinity}',
        b'{"reward": 1e400}',
        b'{"reward": "1"}',
    ):
        refused = await gateway.http.post(
            gateway.url + path, content=raw, headers=headers
        )
        route.check(refused, 400, "invalid_request")
    route.check(
        await gateway.env(path, {"reward": 1.0}, key=other.key), 401, "invalid_api_key"
    )
    for reward in (0.25, 0.75):
        assert (
            await gateway.env(path, {"reward": reward}, key=mine.key)
        ).status_code == 200
    assert (await gateway.env(f"/sessions/{mine.id}")).json()["reward"] == 0.75
    assert (await gateway.env(f"/sessions/{other.id}")).json()["reward"] is None
    await gateway.http.post(mine.base_url + "/chat/completions", json=CHAT)
    await gateway.finish(mine, reward=0.5)
    route.check(
        await gateway.env(path, {"reward": 1.0}, key=mine.key), 409, "session_closed"
    )
    assert (await gateway.env(f"/sessions/{mine.id}")).json()["reward"] == 0.5


async def test_unreadable_session_opening_is_answered_by_any_worker(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
):
    """Behind several workers the one that was asked looks into the body first, for its
    `request_id`."""
    async with running(
        tmp_path, model, renderer, place=WorkerPlace(urls=("", "http://x"))
    ) as gateway:
        codes = {
            b"[" * 10**6: "",  # as the parser of the worker that is asked reads it
            b'{"a":' + b"[" * 10**6: "",
            b'{"request_id": "\xff"}': "invalid_json",
            b'{"request_id": 1}': "invalid_request",
            b"": "invalid_request",
        }
        for raw, code in codes.items():
            headers = {
                "authorization": f"Bearer {ENV_KEY}",
                "content-type": "application/json",
            }
            answer = await gateway.http.post(
                gateway.url + "/sessions", content=raw, headers=headers
            )
            ROUTES[0].check(answer, 400, code)
