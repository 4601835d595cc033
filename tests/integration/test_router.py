"""The real routers in front of the real engine: private, managed by us alone, blind to
strangers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
from fakes import FakeEngine
from scripted_engine import ScriptedEngine, text_by_prompt
from streamed import generate

from invrl.engines.client.generation import GenerateEnd, GenerateRequest
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.router.router_server import RouterServer
from invrl.errors import NoEngineError
from invrl.host.processes.process import process_tree
from invrl.types.sessions import Sampling

ROUTERS = ["sglang-router", "smg"]
NUM_TURNS = 4
"""Of each session."""


@pytest.fixture(params=ROUTERS)
def router(request: pytest.FixtureRequest, tiny_fleet: Fleet) -> RouterServer:
    if request.param == "smg":
        return request.getfixturevalue("smg_router")
    return tiny_fleet.router


@pytest.fixture
async def router_client(
    tiny_fleet: Fleet, router: RouterServer
) -> AsyncIterator[SglangClient]:
    async with SglangClient(
        router.url, limits=tiny_fleet.limits, api_key=router.api_key
    ) as client:
        yield client


def generation(index: int, new: int = 6) -> GenerateRequest:
    return GenerateRequest(
        rid=f"router-{index}-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 50 + index, 60], np.int32),
        sampling=Sampling(max_new_tokens=new),
        ignore_eos=True,
        routing_key=f"s{index}",
    )


async def test_router_forwards_whole_and_streamed_generations(
    router_client: SglangClient,
) -> None:
    results = await asyncio.gather(
        *(generate(router_client, generation(i)) for i in range(8))
    )
    assert all(len(result.ids_T) == 6 for result in results)
    items = [item async for item in router_client.stream(generation(1, new=400))]
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
@pytest.mark.parametrize(
    "what", ["POST /workers", "GET /workers", "DELETE /workers/x", "POST /flush_cache"]
)
async def test_worker_management_needs_the_admin_key(
    router: RouterServer, what: str, key: str
) -> None:
    method, path = what.split()
    given = router.api_key if key == "sampling" else key
    assert await status(method, router.url + path, given) == 401


@pytest.mark.parametrize("key", ["", "wrong"])
async def test_sampling_needs_the_routers_key(router: RouterServer, key: str) -> None:
    assert await status("POST", router.url + "/generate", key) == 401


@pytest.mark.parametrize(
    "path", ["/pause_generation", "/update_weights_from_tensor", "/abort_request"]
)
async def test_router_does_not_forward_engine_management(
    router: RouterServer, path: str
) -> None:
    assert await status("POST", router.url + path, router.api_key) in (401, 404)


def test_router_and_every_engine_process_listen_on_loopback(
    tiny_fleet: Fleet, router: RouterServer
) -> None:
    """Torch's rendezvous store, which has no key, among them."""
    listening: dict[str, str] = {}
    for server in (router, tiny_fleet.engines["engine-0"].server):
        for process in process_tree(server.pid):
            for connection in process.net_connections():
                if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE):
                    listening[f"{process.name()} {connection.laddr.port}"] = (
                        connection.laddr.ip
                    )
    assert len(listening) > 2
    assert set(listening.values()) == {"127.0.0.1"}, listening


async def test_router_sends_requests_only_to_registered_engines(
    tiny_fleet: Fleet, router: RouterServer, router_client: SglangClient
) -> None:
    server = tiny_fleet.engines["engine-0"].server
    await asyncio.to_thread(router.unregister, server.url)
    try:
        with pytest.raises(NoEngineError, match=r"answered /generate with (503|404)"):
            await generate(router_client, generation(3))
    finally:
        await asyncio.to_thread(router.register, server.url, api_key=server.api_key)
    assert len((await generate(router_client, generation(3))).ids_T) == 6


async def test_requests_sent_during_an_engines_pause_wait(
    tiny_fleet: Fleet, router_client: SglangClient
) -> None:
    """Longer than a router needs to eject a worker that does not answer its health
    check, or that makes no token while requests pile up."""
    receiver = tiny_fleet.engines["engine-0"].receiver
    await receiver.pause()
    try:
        flights = [
            asyncio.create_task(generate(router_client, generation(index)))
            for index in range(5)
        ]
        await asyncio.sleep(4.0)
        flights.append(asyncio.create_task(generate(router_client, generation(5))))
        await asyncio.sleep(1.0)
        assert not any(flight.done() for flight in flights)
    finally:
        await receiver.resume()
    async with asyncio.timeout(120):
        results = await asyncio.gather(*flights)
    assert all(len(result.ids_T) == 6 for result in results)


@pytest.fixture(params=ROUTERS)
async def own_router(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[RouterServer]:
    """A router without engines."""
    smg = None
    if request.param == "smg":
        smg = request.getfixturevalue("installed_smg")
    router = RouterServer(run_folder=tmp_path, start_timeout_s=240.0, installed_smg=smg)
    try:
        await asyncio.to_thread(router.wait_ready)
        yield router
    finally:
        await asyncio.to_thread(router.stop)
        router.address.close()


@pytest.fixture
async def own_client(own_router: RouterServer) -> AsyncIterator[SglangClient]:
    limits = EngineLimits(context_length=1000, vocab_size=512)
    key = own_router.api_key
    async with SglangClient(own_router.url, limits=limits, api_key=key) as client:
        yield client


async def register(router: RouterServer, engine: FakeEngine) -> None:
    await asyncio.to_thread(router.register, engine.url, api_key=router.api_key)


async def test_router_says_that_no_engine_got_the_request_to_a_dead_one(
    own_router: RouterServer, own_client: SglangClient, tiny_model: Path
) -> None:
    """Before it notices the death, and after it."""
    async with ScriptedEngine(text_by_prompt, tiny_model) as engine:
        await register(own_router, engine)
        await generate(own_client, generation(0))
    for _ in range(2):
        with pytest.raises(NoEngineError):
            await generate(own_client, generation(0))
        await asyncio.to_thread(own_router.unregister, engine.url)


async def test_router_keeps_a_session_on_one_engine(
    own_router: RouterServer, own_client: SglangClient, tiny_model: Path
) -> None:
    """All sessions begin with the same tokens, so a router that goes by prefixes would
    mix them."""
    first = ScriptedEngine(text_by_prompt, tiny_model)
    second = ScriptedEngine(text_by_prompt, tiny_model)
    async with first, second:
        await register(own_router, first)
        await register(own_router, second)
        for _ in range(NUM_TURNS):
            await asyncio.gather(
                *(generate(own_client, generation(index)) for index in range(20))
            )
    turns_of_first = turns_by_session(first)
    turns_of_second = turns_by_session(second)
    assert turns_of_first
    assert turns_of_second
    assert not turns_of_first.keys() & turns_of_second.keys()
    assert set((turns_of_first | turns_of_second).values()) == {NUM_TURNS}


def turns_by_session(engine: ScriptedEngine) -> Counter[str]:
    """How many generations an engine got from each session."""
    return Counter(body["rid"].split("-")[1] for body in engine.requests)
