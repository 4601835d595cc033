"""A fleet of two, Qwen2 (fused biases, tied embeddings, grouped heads): all engines or none, and an
engine that dies is taken out, and comes back only with the fleet's weights."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest
from tiny_model import make_tiny_model
from torch_trainer import TorchSender

from invrl.errors import ChecksumError, WeightSyncError
from invrl.process import still_running
from invrl.rollout.config import EngineConfig
from invrl.rollout.fleet import Fleet
from invrl.rollout.sglang_client import GenerateRequest, SglangClient
from invrl.types import Sampling, WeightVersion
from invrl.weight_sync import CanaryBound, WeightTransaction


@pytest.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Fleet, TorchSender]]:
    model = make_tiny_model(tmp_path_factory.mktemp("qwen2"), family="qwen2", tie_embeddings=True)
    config = EngineConfig(
        num_engines=2,
        engine_dtype="float32",
        engine_max_total_tokens=4096,
        engine_health_interval_s=0.5,
        engine_start_timeout_s=500.0,
    )
    fleet = Fleet(config, model, tmp_path_factory.mktemp("fleet2"), sglang={"max-running-requests": "16"})
    await fleet.start()
    await fleet.admit()
    try:
        yield fleet, TorchSender(model)
    finally:
        await fleet.stop()


def request(index: int) -> GenerateRequest:
    return GenerateRequest(
        rid=f"pair-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 40 + index], np.int32),
        sampling=Sampling(max_new_tokens=5),
        ignore_eos=True,
        routing_key=f"session-{index}",
    )


async def versions_seen(fleet: Fleet) -> set[int]:
    client = SglangClient(fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key)
    async with client:
        results = await asyncio.gather(*(client.generate(request(index)) for index in range(12)))
    return {span.version for result in results for span in result.spans}


async def test_update_eviction_and_return(pair: tuple[Fleet, TorchSender]) -> None:
    """One story, since each act needs the two engines of the one before."""
    fleet, sender = pair
    updates = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=[[1, 2, 3, 400, 17], [9, 8, 7]],
        bound=CanaryBound.for_dtypes("float32"),
    )
    sender.train(1)
    update = await updates.run(WeightVersion(1))
    assert update.canary_max_gap <= 1e-3
    for receiver in await fleet.receivers():
        staged = await sender.stage(WeightVersion(1))
        assert await receiver.checksums(staged) == sender.checksums()
    assert await versions_seen(fleet) == {1}

    # one engine fails: neither gets the version
    broken = fleet.engines["engine-1"].receiver
    commit = broken.commit

    async def refuse(version: WeightVersion) -> None:
        broken.commit = commit  # type: ignore[method-assign]
        raise WeightSyncError("refused")

    broken.commit = refuse  # type: ignore[method-assign]
    before = sender.checksums()
    sender.train(2)
    with pytest.raises(WeightSyncError, match="engine-1") as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.unrestored == ()
    staged_before = await sender.stage(WeightVersion(2))
    for receiver in await fleet.receivers():
        assert await receiver.checksums(staged_before) == before
    assert await versions_seen(fleet) == {1}

    # an engine that dies is noticed and leaves; the sessions go on with the other
    await _kill_and_wait(fleet, "engine-0")
    assert await versions_seen(fleet) == {1}
    update = await updates.run(WeightVersion(2))

    # it comes back with the fleet's weights, or not at all
    staged, layout = await sender.stage(WeightVersion(2)), await sender.layout()
    wrong = dataclasses.replace(staged, checksums=staged.checksums | {layout[0].name: "0" * 16})
    with pytest.raises(ChecksumError, match=layout[0].name):
        await fleet.restart("engine-0", layout, wrong)
    assert "engine-0" not in fleet.engines
    await fleet.restart("engine-0", layout, staged)
    assert set(fleet.engines) == {"engine-0", "engine-1"}
    assert await versions_seen(fleet) == {2}
    assert await fleet.engines["engine-0"].receiver.checksums(staged) == sender.checksums()


async def _kill_and_wait(fleet: Fleet, name: str) -> None:
    """Kill the whole engine; the health check must take it out, first of the fleet and then of the router."""
    pid, url = fleet.engines[name].server.pid, fleet.engines[name].server.url
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(180):
        while name in fleet.engines or name not in fleet.evicted:
            await asyncio.sleep(0.1)
        while url in {worker["url"] for worker in await asyncio.to_thread(fleet.router._workers)}:
            await asyncio.sleep(0.1)
    left = await asyncio.to_thread(still_running, tree, within_s=60)
    assert not left, f"left behind: {left}"
