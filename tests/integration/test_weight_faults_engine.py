"""The faults of weight updates, each once against SGLang. The engine serves what it holds after each of them:
the canary of the next update is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from dying_trainer import EngineAddress, run_trainer_row
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
    run_engine_row,
    run_weights_row,
    settings_of,
)

from invrl.engines.config import EngineConfig
from invrl.engines.engine_server import EngineServer
from invrl.engines.fleet import Fleet
from invrl.engines.sglang_client import SglangClient
from invrl.weights import broadcast_loads

ONCE = {("arena copy", phase) for phase in ("load", "commit")}
"""Where an engine is killed or stopped here: each time another one has to be started."""


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> TorchSender:
    return TorchSender(tiny_model)


def sender_of(model: TorchSender, transport: Transport, folder: Path) -> FaultySender:
    """Its tensors are the parameters of the model, which answers the canary."""
    sender = FaultySender(model.parameters(), transport, folder)
    sender.answer_logprobs = lambda prompts: [model.token_logprobs(prompt) for prompt in prompts]
    return sender


@pytest.fixture(scope="module")
def senders(
    model: TorchSender, tmp_path_factory: pytest.TempPathFactory
) -> dict[Transport, FaultySender]:
    folder = tmp_path_factory.mktemp("weights")
    return {transport: sender_of(model, transport, folder / transport) for transport in RECEIVERS}


def fleet_of(senders: dict[Transport, FaultySender], transport: Transport, client: SglangClient) -> FaultyFleet:
    receiver = RECEIVERS[transport]("engine-0", client, settings_of(transport))
    return FaultyFleet(senders[transport], [receiver], canary_prompts=CANARY)


@pytest.mark.parametrize("row", WEIGHTS_ROWS, ids=str)
async def test_weights_that_are_wrong(
    row: WeightsRow, tiny_fleet: Fleet, senders: dict[Transport, FaultySender]
) -> None:
    fleet = fleet_of(senders, row.transport, tiny_fleet.engines["engine-0"].client)
    await fleet.update()
    await run_weights_row(row, fleet)


@pytest.mark.parametrize("row", TRAINER_ROWS, ids=str)
async def test_a_trainer_that_ends(
    row: TrainerRow, tiny_fleet: Fleet, senders: dict[Transport, FaultySender], tmp_path: Path
) -> None:
    engine = tiny_fleet.engines["engine-0"]
    fleet = fleet_of(senders, row.transport, engine.client)
    server = engine.server
    address = EngineAddress(url=server.url, api_key=server.api_key, admin_key=server.admin_key)
    await run_trainer_row(row, fleet, address, tmp_path)
