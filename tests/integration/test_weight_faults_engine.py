"""The faults of weight updates, each once against SGLang. The engine serves what it
holds after each of them: the canary of the next update is asked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from dying_trainer import EngineAddress, run_trainer_row
from slow_cases import first_quick
from torch_trainer import TorchSender
from torch_updates import CANARY
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
    run_engine_row,
    run_weights_row,
    settings_of,
)

from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_server import EngineServer
from invrl.host.processes.fork_parent import ForkParent

OWN_ENGINE_ROWS = [
    EngineRow(fault="killed", transport="arena copy", phase="load"),
    EngineRow(fault="stopped", transport="arena copy", phase="request"),
]
"""Each starts an engine of its own, so there are few."""
assert all(row in ENGINE_ROWS for row in OWN_ENGINE_ROWS)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> TorchSender:
    return TorchSender(tiny_model)


def sender_of(model: TorchSender, transport: Transport, folder: Path) -> FaultySender:
    """Its tensors are the parameters of the model, which answers the canary."""
    sender = FaultySender(model.parameters(), transport, folder)
    sender.answer_logprobs = lambda prompts: [
        model.token_logprobs(prompt) for prompt in prompts
    ]
    return sender


@pytest.fixture(scope="module")
def senders(
    model: TorchSender, tmp_path_factory: pytest.TempPathFactory
) -> dict[Transport, FaultySender]:
    folder = tmp_path_factory.mktemp("weights")
    return {
        transport: sender_of(model, transport, folder / transport)
        for transport in RECEIVERS
    }


def fleet_of(
    senders: dict[Transport, FaultySender], transport: Transport, client: SglangClient
) -> FaultyFleet:
    receiver = RECEIVERS[transport]("engine-0", client, settings_of(transport))
    return FaultyFleet(senders[transport], [receiver], canary_prompts=CANARY)


@pytest.mark.parametrize("row", quick_by_transport(WEIGHTS_ROWS), ids=str)
async def test_real_engine_rejects_wrong_weights(
    row: WeightsRow, tiny_fleet: Fleet, senders: dict[Transport, FaultySender]
) -> None:
    fleet = fleet_of(senders, row.transport, tiny_fleet.engines["engine-0"].client)
    await fleet.update()
    await run_weights_row(row, fleet)


@pytest.mark.parametrize("row", first_quick(TRAINER_ROWS), ids=str)
async def test_real_engine_keeps_its_version_when_the_trainer_dies(
    row: TrainerRow,
    tiny_fleet: Fleet,
    senders: dict[Transport, FaultySender],
    tmp_path: Path,
) -> None:
    engine = tiny_fleet.engines["engine-0"]
    fleet = fleet_of(senders, row.transport, engine.client)
    server = engine.server
    address = EngineAddress(
        url=server.url, api_key=server.api_key, admin_key=server.admin_key
    )
    await run_trainer_row(row, fleet, address, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", OWN_ENGINE_ROWS, ids=str)
async def test_update_continues_when_a_real_engine_dies_or_hangs(
    row: EngineRow,
    tiny_fleet: Fleet,
    tiny_model: Path,
    engine_parent: ForkParent,
    senders: dict[Transport, FaultySender],
    tmp_path: Path,
) -> None:
    config = EngineConfig.model_validate({"dtype": "float32", "start_timeout_s": 500.0})
    async with AsyncExitStack() as stack:
        server = EngineServer(
            "doomed",
            config,
            model_path=tiny_model,
            run_folder=tmp_path,
            parent=engine_parent,
        )
        stack.callback(server.stop)
        await asyncio.to_thread(server.wait_ready)
        client = SglangClient(
            server.url,
            limits=tiny_fleet.limits,
            api_key=server.api_key,
            admin_key=server.admin_key,
            name="doomed",
        )
        await stack.enter_async_context(client)
        receiver_type = RECEIVERS[row.transport]
        survivor = receiver_type(
            "engine-0",
            tiny_fleet.engines["engine-0"].client,
            settings_of(row.transport),
        )
        doomed = receiver_type("doomed", client, settings_of(row.transport))
        fleet = FaultyFleet(
            senders[row.transport],
            [survivor, doomed],
            deadline_s=STOPPED_DEADLINE_S if row.fault == "stopped" else DEADLINE_S,
            canary_prompts=CANARY,
        )
        await fleet.update()
        victims = [process.pid for process in server.processes()]
        await run_engine_row(row, fleet, victims, server.stop)
