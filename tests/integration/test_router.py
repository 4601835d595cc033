"""The real router in front of the real engine: private, managed by us alone, blind to strangers."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import psutil
import pytest

from invrl.engines.fleet import Fleet
from invrl.engines.sglang_client import GenerateEnd, GenerateRequest, SglangClient
from invrl.errors import ServerError
from invrl.host.process import family_of
from invrl.types import Sampling


def request(index: int, new: int = 6) -> GenerateRequest:
    return GenerateRequest(
        rid=f"router-{index}-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 50 + index, 60], np.int32),
        sampling=Sampling(max_new_tokens=new),
        ignore_eos=True,
        routing_key=f"s{index}",
    )


async def test_generates_whole_and_streaming(router_client: SglangClient) -> None:
    results = await asyncio.gather(*(router_client.generate(request(i)) for i in range(8)))
    assert all(len(result.ids_T) == 6 for result in results)
    items = [item async for item in router_client.stream(request(1, new=400))]
    assert isinstance(items[-1], GenerateEnd)
    assert len(items) > 5  # the router streams, it does not collect


async def status(method: str, url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"url": "http://127.0.0.1:9", "api_key": "x", "input_ids": [1]}
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, url, json=body, headers=headers) as answer,
    ):
        return answer.status


@pytest.mark.parametrize("key", ["", "wrong", "sampling"])
@pytest.mark.parametrize("what", ["POST /workers", "GET /workers", "DELETE /workers/x", "POST /flush_cache"])
async def test_nobody_else_manages_it(tiny_fleet: Fleet, what: str, key: str) -> None:
    method, path = what.split()
    given = tiny_fleet.router.api_key if key == "sampling" else key
    assert await status(method, tiny_fleet.router.url + path, given) == 401


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_nobody_else_samples(tiny_fleet: Fleet, key: str) -> None:
    assert await status("POST", tiny_fleet.router.url + "/generate", key) == 401


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_tensor", "/abort_request"])
async def test_engine_management_does_not_pass(tiny_fleet: Fleet, path: str) -> None:
    assert await status("POST", tiny_fleet.router.url + path, tiny_fleet.router.api_key) in (401, 404)


def test_the_router_and_every_process_of_an_engine_listen_on_loopback(tiny_fleet: Fleet) -> None:
    """Torch's rendezvous store, which has no key, among them."""
    listening: dict[str, str] = {}
    for server in (tiny_fleet.router, tiny_fleet.engines["engine-0"].server):
        for process in family_of(server.pid):
            for connection in process.net_connections():
                if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    listening[f"{process.name()} {connection.laddr.port}"] = connection.laddr.ip
    assert len(listening) > 2
    assert set(listening.values()) == {"127.0.0.1"}, listening


async def test_only_a_registered_engine_gets_traffic(tiny_fleet: Fleet, router_client: SglangClient) -> None:
    server = tiny_fleet.engines["engine-0"].server
    router = tiny_fleet.router
    await asyncio.to_thread(router.unregister, server.url)
    try:
        with pytest.raises(ServerError, match="503"):
            await router_client.generate(request(3))
    finally:
        await asyncio.to_thread(router.register, server.url, api_key=server.api_key)
    assert len((await router_client.generate(request(3))).ids_T) == 6


async def test_a_request_sent_during_a_pause_waits(tiny_fleet: Fleet, router_client: SglangClient) -> None:
    """Longer than the router needs to eject a worker that does not answer its health check."""
    receiver = tiny_fleet.engines["engine-0"].receiver
    await receiver.pause()
    try:
        flight = asyncio.create_task(router_client.generate(request(4)))
        await asyncio.sleep(4.0)
        assert not flight.done()
    finally:
        await receiver.resume()
    assert len((await asyncio.wait_for(flight, 120)).ids_T) == 6
