"""A fleet of two, Qwen2 (fused biases, tied embeddings, grouped heads): an engine that
refuses, dies or hangs is taken out, updates go on without it, and it comes back only
with the fleet's weights."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from msgspec import structs
from slow_cases import first_quick
from streamed import collect, generate
from tiny_model import make_tiny_model
from torch_trainer import TorchSender

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateRequest,
)
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_launcher import Engine
from invrl.errors import WeightSyncError
from invrl.gateway.rendering.text_stream import TextStream
from invrl.gateway.turns.reply_sampling import ReplySampling
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import process_tree, still_running
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction
from invrl.weights.update.verification import describe

Parts = tuple[Fleet, WeightUpdater, TorchSender]
CANARY = [[1, 2, 3, 400, 17], [9, 8, 7]]


@pytest.fixture(scope="module")
async def shared(
    engine_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Parts]:
    model = make_tiny_model(
        tmp_path_factory.mktemp("qwen2"), family="qwen2", tie_embeddings=True
    )
    config = EngineConfig(
        num_engines=2,
        dtype="float32",
        max_total_tokens=4096,
        health_interval_s=0.5,
        start_timeout_s=500.0,
        max_restarts=10,
    )
    fleet = Fleet(
        config,
        model,
        tmp_path_factory.mktemp("fleet2"),
        sglang={"max-running-requests": "16"},
        heartbeat_timeout_s=6.0,
        parent=engine_parent,
    )
    await fleet.start()
    await fleet.admit()
    try:
        sender = TorchSender(model)
        transaction = WeightTransaction(
            sender,
            fleet.receivers,
            canary_prompts=CANARY,
            bound=CanaryBound.for_dtypes("float32"),
        )
        yield fleet, WeightUpdater(transaction, fleet), sender
    finally:
        await fleet.stop()


@pytest.fixture
async def pair(shared: Parts) -> Parts:
    """Both engines are there and generate, whatever the test before left."""
    fleet, _, _ = shared
    async with asyncio.timeout(900):
        while fleet.engines.keys() != {"engine-0", "engine-1"} or not all_routed(fleet):
            await asyncio.sleep(0.1)
    for engine in fleet.engines.values():
        if engine.receiver.is_paused:
            await engine.receiver.resume()
    return shared


def request(index: int, *, num_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(
        rid=f"pair-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 40 + index], np.int32),
        sampling=Sampling(max_new_tokens=num_tokens),
        ignore_eos=True,
        routing_key=f"session-{index}",
    )


async def versions_seen(fleet: Fleet, *, num_tokens: int = 5) -> set[int]:
    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    async with client:
        results = await asyncio.gather(
            *(
                generate(client, request(index, num_tokens=num_tokens))
                for index in range(12)
            )
        )
    return {span.version for result in results for span in result.spans}


@pytest.mark.timeout(1200)
async def test_refused_and_dead_engines_leave_and_return_with_the_newest_version(
    pair: Parts,
) -> None:
    """One story, since each act needs the two engines of the one before."""
    fleet, updates, sender = pair
    sender.train(1)
    update = await updates.update(WeightVersion(1))
    assert update.canary_max_gap <= 1e-3
    for receiver in await fleet.receivers():
        staged = await sender.stage(WeightVersion(1))
        assert await receiver.checksums(staged) == sender.checksums()
    assert await versions_seen(fleet) == {1}

    # one engine refuses: the update goes on without it, and it comes back with the new
    # version
    refusing = fleet.engines["engine-1"]

    async def refuse(version: WeightVersion) -> None:
        raise WeightSyncError("refused")

    refusing.receiver.commit = refuse  # type: ignore[method-assign]
    sender.train(2)
    update = await updates.update(WeightVersion(2))
    assert list(update.lost_engines) == ["engine-1"]
    assert set(fleet.engines) == {"engine-0"}
    await leaves(fleet, refusing)
    assert await versions_seen(fleet) == {2}
    await comes_back(fleet, refusing)
    assert await versions_seen(fleet) == {2}

    # an engine that dies is noticed and leaves; the sessions go on with the other
    dead = fleet.engines["engine-0"]
    tree = process_tree(dead.server.pid)
    assert set().union(*map(shared_memory_files, tree)) == set()
    sockets = set().union(*map(socket_folders, tree))
    assert sockets
    os.kill(dead.server.pid, signal.SIGKILL)
    await leaves(fleet, dead)
    sender.train(3)
    update = await updates.update(WeightVersion(3))
    assert update.lost_engines == {}
    assert await versions_seen(fleet) == {3}
    await comes_back(fleet, dead)
    assert await asyncio.to_thread(still_running, tree, within_s=60) == []
    assert [folder for folder in sockets if folder.exists()] == []
    assert await versions_seen(fleet) == {3}
    staged = await sender.stage(WeightVersion(4))
    for engine in fleet.engines.values():
        assert await engine.receiver.checksums(staged) == sender.checksums()


@pytest.mark.timeout(1200)
async def test_a_rolling_update_pauses_one_engine_at_a_time(
    pair: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, _, sender = pair
    transaction = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=CANARY,
        bound=CanaryBound.for_dtypes("float32"),
        is_rolling=True,
    )
    updates = WeightUpdater(transaction, fleet)
    paused_together: list[bool] = []
    for engine in fleet.engines.values():
        pause = engine.receiver.pause

        async def noted(pause: Callable[[], Awaitable[None]] = pause) -> None:
            await pause()
            paused_together.append(
                all(engine.receiver.is_paused for engine in fleet.engines.values())
            )

        monkeypatch.setattr(engine.receiver, "pause", noted)
    sender.train(10)
    await updates.update(WeightVersion(10))
    sampling = asyncio.create_task(versions_seen(fleet, num_tokens=200))
    sender.train(11)
    update = await updates.update(WeightVersion(11))
    assert update.lost_engines == {}
    assert update.canary_max_gap <= 1e-3
    assert paused_together == [False] * 4
    assert await sampling <= {10, 11}
    assert await versions_seen(fleet) == {11}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("process", first_quick(["scheduler", "detokenizer", "server"]))
async def test_stopped_engine_process_is_named_and_replaced(
    pair: Parts, process: str
) -> None:
    """SIGSTOP: it is alive, and answers nothing. Its engine leaves after the stated
    time."""
    fleet, _, _ = pair
    hung = fleet.engines["engine-1"]
    tree = process_tree(hung.server.pid)
    stopped = (
        tree[0]
        if process == "server"
        else next(p for p in tree if p.name().startswith(f"sglang::{process[:6]}"))
    )
    begun = time.monotonic()
    stopped.suspend()
    await leaves(fleet, hung)
    print(
        f"{process}: out after {time.monotonic() - begun:.1f} s: {fleet.evicted.get('engine-1')}"
    )
    assert f"pid {stopped.pid}: stopped" in fleet.evicted["engine-1"]
    assert "has not answered for 6 s" in fleet.evicted["engine-1"]
    await comes_back(fleet, hung)
    assert await asyncio.to_thread(still_running, tree, within_s=60) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_stopped_scheduler_is_found_while_the_fleet_is_paused(
    pair: Parts,
) -> None:
    fleet, _, _ = pair
    paused = list(fleet.engines.values())
    for engine in paused:
        await engine.receiver.pause()
    await asyncio.sleep(12.0)  # twice the time after which silence counts
    assert list(fleet.engines.values()) == paused
    hung = fleet.engines["engine-0"]
    next(
        p for p in process_tree(hung.server.pid) if p.name().startswith("sglang::sched")
    ).suspend()
    await leaves(fleet, hung)
    await fleet.engines["engine-1"].receiver.resume()
    await comes_back(fleet, hung)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_replies_of_a_killed_engine_go_on_at_the_other_one(pair: Parts) -> None:
    fleet, _, _ = pair
    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    greedy = Sampling(temperature=0.0, max_new_tokens=300)
    requests = [structs.replace(request(i), sampling=greedy) for i in range(16)]
    streams = [index % 4 < 2 for index in range(16)]
    chunks: list[list[GenerateChunk]] = [[] for _ in requests]
    async with client:
        replies = [
            ReplySampling(
                asked,
                stream=stream,
                sampler=client,
                text_stream=TextStream(lambda ids: "", ()),
                engine_return_s=600.0,
            )
            for asked, stream in zip(requests, streams, strict=True)
        ]
        flights = [
            asyncio.create_task(reply.run(taken.append))
            for reply, taken in zip(replies, chunks, strict=True)
        ]

        def in_the_middle() -> set[bool]:
            """The kinds of replies that engine-0 has begun."""
            return {
                stream
                for reply, stream in zip(replies, streams, strict=True)
                if reply.segments.num_sampled >= 34
                and engines_of(reply) == ["engine-0"]
            }

        async with asyncio.timeout(600):
            while in_the_middle() != {False, True}:
                await asyncio.sleep(0.01)
        killed = fleet.engines["engine-0"]
        os.kill(killed.server.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*flights), 600)
        others = [
            structs.replace(asked, rid=f"{asked.rid}-whole") for asked in requests
        ]
        wholes = await asyncio.gather(*(generate(client, asked) for asked in others))
    assert {end.finish_reason for end in ends} == {"length"}
    for reply, taken, whole in zip(replies, chunks, wholes, strict=True):
        ids_T = np.concatenate([chunk.ids_T for chunk in taken])
        assert ids_T.tolist() == whole.ids_T.tolist()
        logprobs_T = np.concatenate([chunk.logprobs_T for chunk in taken])
        assert logprobs_T == pytest.approx(whole.logprobs_T, abs=1e-3)
        assert reply.segments.spans == whole.spans
    moved: list[bool] = []
    for reply, stream in zip(replies, streams, strict=True):
        if reply.segments.num_segments > 1:
            assert engines_of(reply) == ["engine-0", "engine-1"]
            moved.append(stream)
    print(f"{len(moved)} of {len(replies)} replies moved, {sum(moved)} of them streams")
    assert set(moved) == {False, True}
    await leaves(fleet, killed)


def engines_of(reply: ReplySampling) -> list[str]:
    """The engines that sampled the reply, without the names of their starts."""
    starts = [segment.engine or "" for segment in reply.segments.by_engine]
    return [start.partition(".")[0] for start in starts]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_stopped_router_is_replaced_at_its_address(
    pair: Parts,
) -> None:
    fleet, _, _ = pair
    hung = fleet.router
    psutil.Process(hung.pid).suspend()
    begun = time.monotonic()
    async with asyncio.timeout(600):
        while fleet.router is hung or not all_routed(fleet):
            await asyncio.sleep(0.05)
    print(f"router: back after {time.monotonic() - begun:.1f} s")
    assert (fleet.router.url, fleet.router.api_key) == (hung.url, hung.api_key)
    assert len(await versions_seen(fleet)) == 1
    fleet.check()


@pytest.mark.timeout(1200)
async def test_verification_names_a_weight_changed_outside_of_an_update_while_requests_run(
    pair: Parts,
) -> None:
    fleet, updates, sender = pair
    sender.train(20)
    await updates.update(WeightVersion(20))
    name = "model.layers.1.post_attention_layernorm.weight"
    sender.parameters()[name] += 1
    await fleet.engines["engine-1"].receiver.load(await sender.stage(WeightVersion(21)))

    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    async with client:
        begun = [asyncio.Event() for _ in range(8)]
        requests = [
            structs.replace(request(i), sampling=Sampling(max_new_tokens=500))
            for i in range(8)
        ]
        flights = [
            asyncio.create_task(collect(client.stream(sent), each=event.set))
            for sent, event in zip(requests, begun, strict=True)
        ]
        async with asyncio.timeout(300):
            await asyncio.gather(*(event.wait() for event in begun))
        verification = await updates.verify(60.0)
        assert not any(flight.done() for flight in flights)
        results = [result for _, result in await asyncio.gather(*flights)]
    assert {result.finish_reason for result in results} == {"length"}
    assert {len(result.ids_T) for result in results} == {500}
    print(describe(verification))
    by_name = {engine.engine: engine for engine in verification.engines}
    assert by_name["engine-1"].different == (name,)
    assert by_name["engine-0"].different == ()
    assert by_name["engine-0"].num_bytes == sum(
        tensor.nbytes for tensor in sender.parameters().values()
    )
    assert not any(engine.error for engine in verification.engines)
    assert not verification.all_equal

    await updates.update(WeightVersion(22))
    assert (await updates.verify(60.0)).all_equal


@pytest.mark.timeout(1200)
async def test_snapshot_has_the_load_of_engines_that_replies_name(pair: Parts) -> None:
    """The router passes the name on that an engine gives itself, and sends every
    request with the same key to the same engine."""
    fleet, _, _ = pair
    async with asyncio.timeout(60):
        while set(fleet.load.engines) != {"engine-0", "engine-1"}:
            await asyncio.sleep(0.1)
    loads = fleet.load.engines
    assert {load.kv_tokens for load in loads.values()} == {4096}
    assert not fleet.load.silent
    engines: dict[int, set[str | None]] = {}
    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    async with client:
        for index in 2 * list(range(12)):
            whole = await generate(client, request(index))
            _, streamed = await collect(client.stream(request(index)))
            names = engines.setdefault(index, set())
            names |= {
                fleet.load.engine_of(whole.engine),
                fleet.load.engine_of(streamed.engine),
            }
    assert all(len(names) == 1 for names in engines.values())
    assert set.union(*engines.values()) == {"engine-0", "engine-1"}
    long = asyncio.create_task(
        generate(fleet.engines["engine-0"].client, request(0, num_tokens=2000))
    )
    async with asyncio.timeout(60):
        while not (
            fleet.load.engines["engine-0"].running
            and fleet.load.engines["engine-0"].kv_used
        ):
            assert not long.done(), "it ended before its load was seen"
            await asyncio.sleep(0.1)
    long.cancel()


def all_routed(fleet: Fleet) -> bool:
    return all(
        fleet.router.registered(engine.server.url) for engine in fleet.engines.values()
    )


def shared_memory_files(process: psutil.Process) -> set[str]:
    """What the process would leave in /dev/shm if it were killed now."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {
        line
        for line in lines
        if "/dev/shm/" in line and not line.endswith(" (deleted)")
    }


def socket_folders(process: psutil.Process) -> set[Path]:
    """Folders of the files of the process's Unix sockets."""
    paths = [
        Path(connection.laddr)
        for connection in process.net_connections("unix")
        if connection.laddr
    ]
    return {path.parent for path in paths if path.is_absolute()}


async def leaves(fleet: Fleet, engine: Engine) -> None:
    """First the fleet and then the router forget it."""
    async with asyncio.timeout(600):
        while engine in fleet.engines.values():
            await asyncio.sleep(0.05)
        while engine.server.url in {
            worker["url"] for worker in await asyncio.to_thread(fleet.router._workers)
        }:
            await asyncio.sleep(0.1)


async def comes_back(fleet: Fleet, engine: Engine) -> None:
    name = engine.server.name
    async with asyncio.timeout(900):
        while (
            name not in fleet.engines
            or fleet.engines[name] is engine
            or not all_routed(fleet)
        ):
            fleet.check()
            await asyncio.sleep(0.1)
