"""Turns of two real engines and a trainer: requests that run when a turn begins go on
after it, and engines that are killed while they sleep come back with the fleet's
weights, in the engines' turn."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from streamed import collect, generate
from tiny_model import make_tiny_model
from torch_trainer import TorchSender

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.errors import WeightSyncError
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.run.loop.gpu_turns import GpuTurns, SenderThatSleeps
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

CANARY = [[1, 2, 3, 400, 17], [9, 8, 7]]


class TurnTaking:
    """A trainer that notes whether it has its memory, and whether engines had theirs
    then."""

    def __init__(self, sender: TorchSender, fleet: Fleet) -> None:
        self.sender = sender
        self._fleet = fleet
        self.is_awake = False

    async def wake(self) -> int:
        assert not self.is_awake
        assert all(engine.receiver.is_paused for engine in self._fleet.engines.values())
        self.is_awake = True
        return 0

    async def sleep(self) -> int:
        assert self.is_awake
        assert all(engine.receiver.is_paused for engine in self._fleet.engines.values())
        self.is_awake = False
        return 0

    def train(self, seed: int) -> None:
        assert self.is_awake
        self.sender.train(seed)

    async def layout(self) -> WeightLayout:
        return await self.sender.layout()

    async def stage(self, version: WeightVersion) -> StagedWeights:
        assert self.is_awake
        return await self.sender.stage(version)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return await self.sender.logprobs(prompts)


Parts = tuple[Fleet, WeightUpdater, GpuTurns, TurnTaking]


@pytest.fixture(scope="module")
async def parts(
    engine_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Parts]:
    model = make_tiny_model(tmp_path_factory.mktemp("qwen3"))
    config = EngineConfig(
        num_engines=2,
        dtype="float32",
        max_total_tokens=4096,
        health_interval_s=0.5,
        start_timeout_s=500.0,
    )
    fleet = Fleet(
        config,
        model,
        tmp_path_factory.mktemp("fleet"),
        shares_gpus=True,
        parent=engine_parent,
    )
    await fleet.start()
    await fleet.admit()
    try:
        trainer = TurnTaking(TorchSender(model), fleet)
        transaction = WeightTransaction(
            SenderThatSleeps(trainer),
            fleet.receivers,
            canary_prompts=CANARY,
            bound=CanaryBound.for_dtypes("float32"),
            until_engine=fleet.until_engine,
        )
        updater = WeightUpdater(transaction, fleet)
        turns = GpuTurns(trainer, fleet, suspend=updater.suspend, update=updater.update)
        yield fleet, updater, turns, trainer
    finally:
        await fleet.stop()


def request(index: int, *, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        rid=f"turns-{np.random.randint(1 << 40)}",
        input_ids_T=np.array([1, 40 + index], np.int32),
        sampling=Sampling(max_new_tokens=num_tokens),
        ignore_eos=True,
        routing_key=f"session-{index}",
    )


async def comes_back(fleet: Fleet, name: str) -> None:
    async with asyncio.timeout(900):
        while name not in fleet.engines or not fleet.router.registered(
            fleet.engines[name].server.url
        ):
            fleet.check()
            await asyncio.sleep(0.1)


@pytest.mark.timeout(1200)
async def test_requests_wait_for_sleeping_engines_and_a_killed_engine_comes_back(
    parts: Parts,
) -> None:
    """One story, since each act needs the two engines of the one before."""
    fleet, updater, turns, trainer = parts
    await turns.give_to_trainer()
    update = await turns.update(WeightVersion(1))
    assert update.canary_max_gap <= 1e-3

    # what runs when a turn begins goes on after it, and no token is sampled in between
    client = SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    )
    async with client:
        begun = [asyncio.Event() for _ in range(4)]
        flights = [
            asyncio.create_task(
                collect(client.stream(request(index, num_tokens=300)), each=event.set)
            )
            for index, event in enumerate(begun)
        ]
        async with asyncio.timeout(300):
            await asyncio.gather(*(event.wait() for event in begun))
        await turns.give_to_trainer()
        trainer.train(2)
        late = asyncio.create_task(generate(client, request(9, num_tokens=5)))
        await asyncio.sleep(0.5)
        assert not late.done()
        with pytest.raises(WeightSyncError, match="in progress"):
            async with updater._transaction.holding_committed("a reader", 0.1):
                pass
        await turns.update(WeightVersion(2))
        for _, result in await asyncio.gather(*flights):
            assert len(result.ids_T) == 300
            assert [span.version for span in result.spans] == [1, 2]
        assert {span.version for span in (await late).spans} == {2}

    # an engine that is killed while it sleeps: the turn ends without it, and only then
    # it starts again
    await turns.give_to_trainer()
    trainer.train(3)
    dead = fleet.engines["engine-0"]
    os.kill(dead.server.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        while "engine-0" in fleet.engines:
            await asyncio.sleep(0.05)
    await fleet.until_lost_have_ended()
    await asyncio.sleep(0.5)
    assert fleet.state().restarts == {}, "it started in the trainer's turn"
    update = await turns.update(WeightVersion(3))
    assert update.lost_engines == {}
    await comes_back(fleet, "engine-0")
    assert fleet.state().restarts == {"engine-0": 1}

    # both take part in the next turn
    await turns.give_to_trainer()
    trainer.train(4)
    update = await turns.update(WeightVersion(4))
    assert (update.lost_engines, len(fleet.engines)) == ({}, 2)
    await all_hold(4, fleet, trainer)

    # all engines are killed while they sleep: the update waits for one of them
    await turns.give_to_trainer()
    trainer.train(5)
    for engine in fleet.engines.values():
        os.kill(engine.server.pid, signal.SIGKILL)
    async with asyncio.timeout(120):
        while fleet.engines:
            await asyncio.sleep(0.05)
    update = await asyncio.wait_for(turns.update(WeightVersion(5)), 900)
    assert (update.version, update.lost_engines) == (5, {})
    for name in ("engine-0", "engine-1"):
        await comes_back(fleet, name)
    assert fleet.state().restarts == {"engine-0": 2, "engine-1": 1}
    await all_hold(5, fleet, trainer)
    async with SglangClient(
        fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
    ) as client:
        served = await generate(client, request(1, num_tokens=5))
    assert {span.version for span in served.spans} == {5}


async def all_hold(version: int, fleet: Fleet, trainer: TurnTaking) -> None:
    staged = await trainer.sender.stage(WeightVersion(version + 1))
    for engine in fleet.engines.values():
        assert await engine.receiver.checksums(staged) == trainer.sender.checksums()
        assert await engine.client.weight_version() == str(version)
