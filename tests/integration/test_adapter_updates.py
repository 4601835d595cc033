"""Weight updates that send an adapter alone, from a trainer rank to a real engine that
generates meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import make_family_model
from pool_sender import PoolSender
from rank_pool import RankPool, Trainer
from safetensors.torch import load_file, save_file
from torch_updates import CANARY, FP32
from train_reference import random_batch

from invrl.engines.client.generation import (
    GenerateChunk,
    GenerateRequest,
)
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.served_adapter import ServedAdapter
from invrl.errors import ServerError, WeightSyncError
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import StagedWeights
from invrl.train.config import TrainConfig
from invrl.types.sessions import Sampling
from invrl.types.weights import WeightVersion
from invrl.weights.config import AdapterWeights
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.update.transaction import WeightTransaction

KINDS = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
SERVED = ServedAdapter(rank=4, targets=KINDS, num_versions=3)
LORA = {"rank": 4, "alpha": 8.0}
MOST_RUNNING = 5
LONG = 16_000
"""Tokens of a request that outlasts the test."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can be asked for so many tokens that no reply ends by itself."""
    folder = make_family_model(tmp_path_factory.mktemp("model"), "llama")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4 * LONG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def trainer(pool: RankPool, model: Path, tmp_path: Path) -> Trainer:
    train: dict[str, Any] = {"train_dtype": "float32", "lr": 2e-2, "lora": LORA}
    return pool.build(
        model,
        train=TrainConfig.model_validate(train),
        weights={
            "weights": AdapterWeights(),
            "weight_folder": str(tmp_path / "weights"),
        },
    )


@pytest.fixture
async def fleet(
    engine_parent: ForkParent, model: Path, tmp_path: Path
) -> AsyncIterator[Fleet]:
    config = EngineConfig(
        dtype="float32",
        start_timeout_s=500.0,
        health_interval_s=0.5,
        max_total_tokens=5 * LONG,
    )
    started = Fleet(
        config,
        model,
        tmp_path / "fleet",
        weights=AdapterWeights(),
        adapter=SERVED,
        sglang={"max-running-requests": str(MOST_RUNNING)},
        heartbeat_timeout_s=300.0,
        parent=engine_parent,
    )
    await started.start()
    try:
        await started.admit()
        yield started
    finally:
        await started.stop()


def request(rid: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        rid=rid,
        input_ids_T=np.array([5, 400, 33, 90], np.int32),
        sampling=Sampling(max_new_tokens=tokens, temperature=1.0),
        ignore_eos=True,
    )


class Generation:
    """One generation in the background, and the versions of its tokens."""

    def __init__(self, fleet: Fleet, rid: str, tokens: int) -> None:
        self.num_tokens = 0
        self.versions: set[int] = set()
        self.begun = asyncio.Event()
        client = fleet.engines["engine-0"].client
        self.task = asyncio.create_task(self._read(client, request(rid, tokens)))

    async def _read(self, client: Any, wanted: GenerateRequest) -> None:
        async for event in client.stream(wanted):
            self.versions |= {int(span.version) for span in event.spans}
            if isinstance(event, GenerateChunk):
                self.num_tokens += len(event.ids_T)
            self.begun.set()


async def abort_in_the_queue(fleet: Fleet, *, num_running: int) -> None:
    """Fill the engine, and abort a request that waits, then those that fill it."""
    fillers = [
        Generation(fleet, f"filler-{index}", LONG)
        for index in range(MOST_RUNNING - num_running)
    ]
    for filler in fillers:
        await asyncio.wait_for(filler.begun.wait(), 60)
    waiting = Generation(fleet, "waiting", LONG)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting.begun.wait(), 3)
    for generation in (waiting, *fillers):
        generation.task.cancel()
    await asyncio.wait({generation.task for generation in (waiting, *fillers)})


class SpoilingSender(PoolSender):
    """Changes a staged folder before engines load it."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.spoil: Callable[[Path], object] = lambda folder: None

    async def stage(self, version: WeightVersion) -> StagedWeights:
        staged = await super().stage(version)
        self.spoil(Path(staged.handle))
        return staged


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def without(kind: str) -> Callable[[Path], None]:
    """A folder that lacks the factors of a kind of projection."""

    def remove(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file({name: t for name, t in tensors.items() if kind not in name}, file)

    return remove


async def expect_damage_to_be_found(
    sender: SpoilingSender, transaction: WeightTransaction, fleet: Fleet
) -> None:
    """No damaged folder is served, and none ends the engine."""
    engine = fleet.engines["engine-0"]
    served = await engine.receiver.read_back(())
    newest = WeightVersion(int(served.version) + 1)
    for damage in (truncate, *map(without, KINDS)):
        sender.spoil = damage
        with pytest.raises(WeightSyncError):
            await transaction.run(newest)
        assert await engine.receiver.read_back(()) == served
    sender.spoil = lambda folder: None
    await transaction.run(newest)


def factor_checksums(folder: Path) -> dict[str, str]:
    return {
        name: checksum(tensor)
        for name, tensor in load_file(folder / "adapter_model.safetensors").items()
    }


async def test_an_engine_serves_new_versions_while_requests_end_on_theirs(
    trainer: Trainer, fleet: Fleet, tmp_path: Path
) -> None:
    sender = SpoilingSender(trainer)
    transaction = WeightTransaction(
        sender,
        fleet.receivers,
        canary_prompts=CANARY,
        bound=FP32,
        pauses=False,
    )
    first = await transaction.run(WeightVersion(0))
    assert first.canary_max_gap <= 1e-4
    base = await fleet.engines["engine-0"].client.prompt_logprobs(CANARY)
    long = [Generation(fleet, f"long-{index}", LONG) for index in range(3)]
    for generation in long:
        await asyncio.wait_for(generation.begun.wait(), 60)
    await abort_in_the_queue(fleet, num_running=len(long))
    trainer.train(random_batch(1))
    second = await transaction.run(WeightVersion(1))
    assert second.seconds["paused"] == 0
    assert second.canary_max_gap <= 1e-4
    assert second.num_bytes == first.num_bytes < 100_000
    changed = await fleet.engines["engine-0"].client.prompt_logprobs(CANARY)
    assert np.abs(np.concatenate(changed) - np.concatenate(base)).max() > 0.01
    assert not any(generation.task.done() for generation in long)
    short = Generation(fleet, "short", 8)
    await short.task
    assert short.versions == {1}

    receiver = fleet.engines["engine-0"].receiver
    read = await receiver.read_back(())
    assert read.version == "1"
    export = tmp_path / "export"
    trainer.each("export", str(export))
    assert read.checksums == factor_checksums(export)

    trainer.train(random_batch(2))
    third = await transaction.run(WeightVersion(2))
    assert third.canary_max_gap <= 1e-4
    assert all(generation.versions == {0} for generation in long)
    assert not any(generation.task.done() for generation in long)
    # Versions 0, which is used, 1 and 2 were the three that there is room for.
    trainer.train(random_batch(3))
    await transaction.run(WeightVersion(3))
    assert not any(generation.task.done() for generation in long)
    newer = Generation(fleet, "newer", LONG)
    await asyncio.wait_for(newer.begun.wait(), 60)
    # Version 2 leaves for 4. Then 0 and 3 are used, and 4 is the newest.
    trainer.train(random_batch(4))
    await transaction.run(WeightVersion(4))
    assert not any(generation.task.done() for generation in long)
    trainer.train(random_batch(5))
    await transaction.run(WeightVersion(5))
    for generation in long:
        with pytest.raises(ServerError, match="abort"):
            await generation.task
        assert generation.versions == {0}
    assert not newer.task.done()
    newer.task.cancel()
    await expect_damage_to_be_found(sender, transaction, fleet)
