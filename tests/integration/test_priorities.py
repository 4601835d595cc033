"""An engine with a gate before it samples waiting requests by the age of their group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from streamed import generate
from virtual_agents import open_record

from invrl.engines.client.generation import GenerateRequest
from invrl.engines.client.sglang_client import SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.gateway.gate.gate import Gate, GatedSampler
from invrl.gateway.gate.policies import program
from invrl.host.processes.fork_parent import ForkParent
from invrl.types.fleet import EngineLoad
from invrl.types.sessions import Sampling

OPENED_AT = {"youngest": 400.0, "young": 300.0, "middle": 200.0, "oldest": 100.0}
"""Sessions, each the only one of its group."""


def request(session_id: str, num_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        rid=f"turn-of-{session_id}",
        input_ids_T=np.array([1, 30, 40], np.int32),
        sampling=Sampling(max_new_tokens=num_tokens),
        routing_key=session_id,
        ignore_eos=True,
    )


async def loaded(fleet: Fleet, *, running: int, waiting: int) -> None:
    """Wait until the engine reports so many requests."""
    async with asyncio.timeout(120):
        while True:
            load = fleet.load.engines.get("engine-0", EngineLoad())
            if (load.running, load.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.1)


@pytest.mark.timeout(1200)
@pytest.mark.slow
async def test_oldest_group_is_sampled_first_and_running_requests_are_not_preempted(
    engine_parent: ForkParent, tiny_model: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        num_engines=1,
        dtype="float32",
        max_total_tokens=4096,
        start_timeout_s=500.0,
    )
    fleet = Fleet(
        config,
        tiny_model,
        tmp_path,
        sglang={"max_running_requests": "1"},
        by_priority=True,
        parent=engine_parent,
    )
    ended: list[str] = []
    try:
        await fleet.start()
        await fleet.admit()
        client = SglangClient(
            fleet.router.url, limits=fleet.limits, api_key=fleet.router.api_key
        )
        gate = Gate(
            program,
            max_hold_s=600.0,
            open_sessions=lambda: [
                open_record(name, group, opened_at)
                for group, (name, opened_at) in enumerate(OPENED_AT.items())
            ],
            read_fleet=lambda: fleet.load,
            sends_priority=True,
        )
        sampler = GatedSampler(client, gate)

        async def turn(session_id: str, num_tokens: int) -> None:
            whole = await generate(sampler, request(session_id, num_tokens))
            assert len(whole.ids_T) == num_tokens
            ended.append(session_id)

        async with client, asyncio.TaskGroup() as turns:
            turns.create_task(turn("youngest", 3000))
            await loaded(fleet, running=1, waiting=0)
            for session_id in ("young", "middle", "oldest"):
                turns.create_task(turn(session_id, 8))
            await loaded(fleet, running=1, waiting=3)
            assert not ended
    finally:
        await fleet.stop()
    assert ended == ["youngest", "oldest", "middle", "young"]
