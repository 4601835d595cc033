"""Every fault of a weight update, against processes with the engine's loader and
without SGLang around it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from dying_trainer import EngineAddress, run_trainer_row
from weight_faults import (
    DEADLINE_S,
    ENGINE_ROWS,
    RECEIVERS,
    STOPPED_DEADLINE_S,
    TRAINER_ROWS,
    WEIGHTS_ROWS,
    EngineRow,
    FaultyFleet,
    FaultySender,
    TrainerRow,
    Transport,
    WeightsRow,
    quick_by_transport,
    random_weights,
    run_engine_row,
    run_weights_row,
    settings_of,
)

from benchmarks.weight_updates.loader_server import LoaderServer
from invrl.engines.client import weight_receiver
from invrl.engines.client.weight_receiver import EngineReceiver
from invrl.host.processes.fork_parent import ForkParent
from invrl.types.weights import TensorSpec
from invrl.weights.transports import joint_loads

REPETITIONS = int(os.environ.get("INVRL_FAULT_REPETITIONS", "1"))
START_S = 120.0
_LAYER = "model.layers.0"
LAYOUT = (
    TensorSpec(name="model.embed_tokens.weight", shape=(3001, 1000), dtype="float32"),
    TensorSpec(
        name=f"{_LAYER}.self_attn.q_proj.weight", shape=(1000, 1000), dtype="float32"
    ),
    TensorSpec(
        name=f"{_LAYER}.self_attn.k_proj.weight", shape=(500, 1000), dtype="float32"
    ),
    TensorSpec(
        name=f"{_LAYER}.self_attn.v_proj.weight", shape=(500, 1000), dtype="float32"
    ),
    TensorSpec(
        name=f"{_LAYER}.self_attn.o_proj.weight", shape=(1000, 1000), dtype="float32"
    ),
    TensorSpec(
        name=f"{_LAYER}.mlp.down_proj.weight", shape=(3000, 1000), dtype="float32"
    ),
    TensorSpec(name="model.norm.weight", shape=(1000,), dtype="float32"),
)
"""Three buckets of a broadcast; q, k and v are one parameter of the engine."""


class Loaders:
    """Processes with the engine's loader. One more than is asked for is always
    starting."""

    def __init__(self, folder: Path, stack: AsyncExitStack, parent: ForkParent) -> None:
        self._folder = folder
        self._parent = parent
        self._stack = stack
        self._number = 0
        self._starting = self._start()
        self._lasting: dict[str, LoaderServer] = {}

    def _start(self) -> LoaderServer:
        folder = self._folder / f"loader-{self._number}"
        folder.mkdir()
        self._number += 1
        server = LoaderServer(LAYOUT, folder, parent=self._parent)
        self._stack.callback(server.stop)
        return server

    def new(self) -> LoaderServer:
        server = self._starting
        self._starting = self._start()
        server.wait_ready(deadline_s=START_S)
        return server

    def lasting(self, transport: Transport) -> LoaderServer:
        """The one that survives every fault. Parameters that point at an arena keep a
        lease on it, so the transport `arena alias` has an engine of its own."""
        kind = "aliases" if transport == "arena alias" else "copies"
        if kind not in self._lasting:
            self._lasting[kind] = self.new()
        server = self._lasting[kind]
        assert server.alive()
        return server


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For an engine that has hung; one that has not answers in milliseconds."""
    monkeypatch.setattr(weight_receiver, "_END_AFTER_FAILURE_S", 1.0)


@pytest.fixture(scope="module")
async def loaders(
    loader_parent: ForkParent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Loaders]:
    async with AsyncExitStack() as stack:
        yield Loaders(tmp_path_factory.mktemp("loaders"), stack, loader_parent)


@pytest.fixture(scope="module")
def senders(tmp_path_factory: pytest.TempPathFactory) -> dict[Transport, FaultySender]:
    """One for each transport: an arena lives as long as its trainer."""
    return {
        transport: FaultySender(
            random_weights(LAYOUT, 1),
            transport,
            tmp_path_factory.mktemp("weights") / "w",
        )
        for transport in RECEIVERS
    }


async def receiver_of(
    name: str, server: LoaderServer, transport: Transport, stack: AsyncExitStack
) -> EngineReceiver:
    client = await stack.enter_async_context(server.client())
    return RECEIVERS[transport](name, client, settings_of(transport))


@pytest.mark.parametrize("row", WEIGHTS_ROWS, ids=str)
async def test_wrong_weights_are_found_by_each_transport(
    row: WeightsRow, loaders: Loaders, senders: dict[Transport, FaultySender]
) -> None:
    async with AsyncExitStack() as stack:
        engine = await receiver_of(
            "engine", loaders.lasting(row.transport), row.transport, stack
        )
        fleet = FaultyFleet(senders[row.transport], [engine])
        await fleet.update()
        for _ in range(REPETITIONS):
            await run_weights_row(row, fleet)


@pytest.mark.parametrize("row", quick_by_transport(ENGINE_ROWS), ids=str)
async def test_update_continues_when_an_engine_dies_or_hangs(
    row: EngineRow,
    loaders: Loaders,
    senders: dict[Transport, FaultySender],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joint_loads, "_ANSWER_S", 2.0)
    deadline_s = DEADLINE_S
    if row.fault == "stopped" and row.transport != "collective":
        deadline_s = STOPPED_DEADLINE_S
    for _ in range(REPETITIONS):
        async with AsyncExitStack() as stack:
            survivor = await receiver_of(
                "survivor", loaders.lasting(row.transport), row.transport, stack
            )
            doomed = loaders.new()
            stack.callback(doomed.stop)
            victim = await receiver_of("victim", doomed, row.transport, stack)
            fleet = FaultyFleet(
                senders[row.transport], [survivor, victim], deadline_s=deadline_s
            )
            await fleet.update()
            await run_engine_row(row, fleet, [doomed.pid], doomed.stop)


@pytest.mark.parametrize("row", quick_by_transport(TRAINER_ROWS), ids=str)
async def test_engine_keeps_its_version_when_the_trainer_dies(
    row: TrainerRow,
    loaders: Loaders,
    senders: dict[Transport, FaultySender],
    tmp_path: Path,
) -> None:
    server = loaders.lasting(row.transport)
    for repetition in range(REPETITIONS):
        async with AsyncExitStack() as stack:
            engine = await receiver_of("engine", server, row.transport, stack)
            fleet = FaultyFleet(senders[row.transport], [engine])
            address = EngineAddress(
                url=f"http://127.0.0.1:{server._port.number}",
                api_key=server._key,
                admin_key=server._key,
            )
            await run_trainer_row(row, fleet, address, tmp_path / str(repetition))
