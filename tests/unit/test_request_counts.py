"""What the gateway counts of its requests: by route and status, and how long they
took."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from gateway_workers import Workers
from running_gateway import ASK, Running
from starlette.types import Message, Scope

from invrl.gateway.server.workers.request_counts import (
    BOUNDS_S,
    CLIENT_LEFT,
    CountedApp,
    RequestCounts,
)


def test_latency_buckets_are_cumulative_and_include_their_bounds() -> None:
    counts = RequestCounts()
    for seconds in (0.001, 0.005, 0.0051, 1.0, 299.0, 1000.0):
        counts.count("/v1/x", 200, seconds)
    counts.count("/v1/x", 503, 0.5)
    summary = counts.summary()["/v1/x"]
    assert summary["statuses"] == {"200": 6, "503": 1}
    buckets = summary["buckets"]
    assert isinstance(buckets, dict)
    assert list(buckets) == [*map(str, BOUNDS_S), "+Inf"]
    assert [
        buckets[bound]
        for bound in ("0.005", "0.01", "0.5", "1.0", "60.0", "300.0", "+Inf")
    ] == [
        2,
        3,
        4,
        5,
        5,
        6,
        7,
    ]
    assert summary["seconds"] == pytest.approx(1300.5111)


async def call(app: CountedApp) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await app({"type": "http"}, receive, send)


async def test_request_is_counted_for_every_kind_of_end() -> None:
    counts = RequestCounts()

    async def answers(scope: Scope, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 201})  # type: ignore[operator]

    async def answers_nothing(scope: Scope, receive: object, send: object) -> None:
        pass

    async def fails(scope: Scope, receive: object, send: object) -> None:
        raise RuntimeError("inside")

    async def breaks_off(scope: Scope, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200})  # type: ignore[operator]
        raise RuntimeError("inside")

    async def is_cancelled(scope: Scope, receive: object, send: object) -> None:
        raise asyncio.CancelledError

    for app in (answers, answers_nothing, fails, breaks_off, is_cancelled):
        counted = CountedApp(app, counts=counts, route_of=lambda _: "/r")
        try:
            await call(counted)
        except (RuntimeError, asyncio.CancelledError):
            assert app in (fails, breaks_off, is_cancelled), (
                "what the app raises goes on"
            )
    assert counts.summary()["/r"]["statuses"] == {
        "201": 1,
        str(CLIENT_LEFT): 2,
        "500": 1,
        "200": 1,
    }


async def test_counted_routes_contain_neither_keys_nor_ids(gateway: Running) -> None:
    [session] = await gateway.open()
    client = gateway.client(session)
    await client.chat.completions.create(model="tiny", messages=[ASK])
    await client.models.list()
    await gateway.finish(session)
    async with httpx.AsyncClient() as http:
        assert (
            await http.get(f"{gateway.url}/nothing/{session.key}")
        ).status_code == 404
        assert (await http.get(f"{gateway.url}/metrics")).status_code == 401
        assert (
            await http.post(f"{gateway.url}/s/wrong/v1/messages", json={})
        ).status_code == 401
    [worker] = (await gateway.env("/metrics")).json()["workers"].values()
    statuses = {
        route: counted["statuses"] for route, counted in worker["requests"].items()
    }
    assert statuses == {
        "/sessions": {"201": 1},
        "/v1/chat/completions": {"200": 1},
        "/v1/models": {"200": 1},
        "/sessions/{session_id}/finish": {"200": 1},
        "other": {"404": 1},
        "/metrics": {"401": 1},
        "/v1/messages": {"401": 1},
    }
    assert worker["tokens"]["sampled"] > 0


async def test_forwarded_request_is_counted_once_by_the_owning_worker(
    workers: Workers, tmp_path: Path
) -> None:
    [session] = await workers.at[1].open()
    client = workers.at[0].client(
        session, base_url=f"{workers.urls[0]}/s/{session.key}/v1"
    )
    await client.chat.completions.create(model="tiny", messages=[ASK])
    await workers.at[0].finish(session)
    by_worker = (await workers.at[0].env("/metrics")).json()["workers"]
    assert by_worker["0"]["requests"] == {}
    owner = by_worker["1"]["requests"]
    assert owner["/v1/chat/completions"]["statuses"] == {"200": 1}
    assert owner["/sessions/{session_id}/finish"]["statuses"] == {"200": 1}
