"""The only engine of a fleet is killed: it comes back with the newest weights, and the
update that goes on meanwhile waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from streamed import generate
from tiny_model import make_tiny_model
from torch_trainer import TorchSender

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.host.output.incidents import incidents_shown
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    config = EngineConfig(
        num_engines=1,
        dtype="float32",
        max_total_tokens=4096,
        health_interval_s=0.5,
        start_timeout_s=500.0,
    )
    fleet = Fleet(config, make_tiny_model(tmp_path / "model"), tmp_path / "run")
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


async def sampled_version(fleet: Fleet) -> int:
    request = GenerateRequest(
        rid=f"alone-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 40], np.int32),
        sampling=Sampling(max_new_tokens=2),
        ignore_eos=True,
    )
    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    async with client:
        result = await generate(client, request)
    return result.spans[-1].version


@pytest.mark.timeout(1200)
async def test_an_update_reaches_the_only_engine_after_it_was_killed(
    fleet: Fleet, tmp_path: Path
) -> None:
    lines: list[str] = []
    sender = TorchSender(tmp_path / "model")
    transaction = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=[[1, 2, 3, 400, 17]],
        bound=CanaryBound.for_dtypes("float32"),
        until_engine=fleet.until_engine,
    )
    updater = WeightUpdater(transaction, fleet)
    await updater.update(WeightVersion(1))
    await fleet.admit()
    assert await sampled_version(fleet) == 1
    with incidents_shown(lines.append):
        killed = fleet.engines["engine-0"]
        os.kill(killed.server.pid, signal.SIGKILL)
        sender.train(2)
        update = await asyncio.wait_for(updater.update(WeightVersion(2)), 900)
        fleet.check()
        assert update.version == 2
        assert fleet.engines["engine-0"] is not killed
        async with asyncio.timeout(60):
            while not any("engine-0 is back" in line for line in lines):
                await asyncio.sleep(0.1)
        assert await sampled_version(fleet) == 2
        staged = await sender.stage(WeightVersion(3))
        receiver = fleet.engines["engine-0"].receiver
        assert await receiver.checksums(staged) == sender.checksums()

        os.kill(fleet.engines["engine-0"].server.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while fleet.engines:
                await asyncio.sleep(0.05)
        fleet.check()
        async with asyncio.timeout(900):
            while sum("engine-0 is back" in line for line in lines) < 2:
                await asyncio.sleep(0.1)
        assert await sampled_version(fleet) == 2
    assert sum("leaves the fleet" in line for line in lines) == 2
    assert sum("no engine is left" in line for line in lines) == 2
