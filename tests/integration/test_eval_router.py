"""Two real engines behind their real routers and the real gateway: evaluation samples at
engine-1 alone, and training at engine-0, also after engine-1 was killed.

The engines name their weights differently, so the version of a token says which one
sampled it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from tiny_model import make_tiny_model

from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.host.processes.fork_parent import ForkParent
from invrl.interfaces import WeightReceiver
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.run_store import RunStore
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Purpose
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

ENV_KEY = "env-0123456789abcdef"
TRAINING = WeightVersion(0)
EVALUATION = WeightVersion(7)
AFTER_RESTART = WeightVersion(8)


@dataclass
class Served:
    fleet: Fleet
    sessions: SessionClient
    store: RunStore

    async def versions(self, purpose: Purpose, group: str) -> set[int]:
        """Versions of the tokens that four new sessions sample."""
        members = tuple(GroupMember(index=index, attempt=0) for index in range(4))
        task = Task(id=group, payload={})
        lease = GroupLease(group_id=group, task=task, members=members)
        opened = await self.sessions.open(lease, purpose=purpose)
        await asyncio.gather(
            *(_ask(session.base_url, session.key) for session in opened)
        )
        turns = [turn for session in opened for turn in self.store.turns(session.id)]
        assert len(turns) == 4
        return {span.version for turn in turns for span in turn.spans}


async def _ask(base_url: str, key: str) -> None:
    question = "What is 12*13?"
    async with openai.AsyncOpenAI(
        base_url=base_url,
        api_key=key,
        max_retries=0,
        timeout=900,
        http_client=httpx.AsyncClient(verify=False),
    ) as client:
        await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            max_tokens=8,
        )


@pytest.fixture
async def served(engine_parent: ForkParent, tmp_path: Path) -> AsyncIterator[Served]:
    model = make_tiny_model(tmp_path / "model")
    config = EngineConfig(
        num_engines=2,
        dtype="float32",
        max_total_tokens=4096,
        health_interval_s=0.5,
        start_timeout_s=500.0,
    )
    fleet = Fleet(config, model, tmp_path / "run", parent=engine_parent, eval_engines=1)
    await fleet.start()
    try:
        await fleet.engines["engine-1"].receiver.commit(EVALUATION)
        await fleet.admit()
        settings = gateway_settings(fleet, model, tmp_path)
        gateway = GatewayServer(
            settings, folder=tmp_path / "private", log=tmp_path / "gateway.log"
        )
        try:
            await asyncio.to_thread(gateway.wait_ready, deadline_s=120)
            gateway.announce_version(AFTER_RESTART)
            sessions = SessionClient(gateway.url, env_key=ENV_KEY)
            yield Served(fleet, sessions, RunStore(Path(settings.store_path)))
            await sessions.close()
        finally:
            await asyncio.to_thread(gateway.stop)
    finally:
        await fleet.stop()


def gateway_settings(fleet: Fleet, model: Path, folder: Path) -> GatewaySettings:
    eval_router = fleet.eval_router
    assert eval_router is not None
    values = {
        "tool_call_parser": "none",
        "reasoning_parser": "none",
        "port": free_port(),
        "router_url": fleet.router.url,
        "router_api_key": fleet.router.api_key,
        "eval_router_url": eval_router.url,
        "eval_router_api_key": eval_router.api_key,
        "env_key": ENV_KEY,
        "model_path": str(model),
        "model_name": "tiny",
        "store_path": str(folder / "run.db"),
        "context_length": fleet.limits.context_length,
        "vocab_size": fleet.limits.vocab_size,
    }
    return GatewaySettings.model_validate(values)


async def bring_up(receiver: WeightReceiver, join: Callable[[], None]) -> None:
    await receiver.commit(AFTER_RESTART)
    join()


@pytest.mark.timeout(1200)
@pytest.mark.slow
async def test_evaluation_samples_at_its_engine_alone_also_after_its_death(
    served: Served,
) -> None:
    fleet = served.fleet
    fleet.restart_evicted(bring_up)
    assert await served.versions("train", "before") == {TRAINING}
    assert await served.versions("eval", "eval-before") == {EVALUATION}

    killed = fleet.engines["engine-1"]
    os.kill(killed.server.pid, signal.SIGKILL)
    async with asyncio.timeout(600):
        while killed in fleet.engines.values():
            await asyncio.sleep(0.05)
    evaluating = asyncio.create_task(served.versions("eval", "eval-after"))
    assert await served.versions("train", "meanwhile") == {TRAINING}
    async with asyncio.timeout(900):
        assert await evaluating == {AFTER_RESTART}
    fleet.check()
    assert await served.versions("train", "after") == {TRAINING}
