"""Seeded sampling on a real engine behind router and gateway: the same place in a run
samples the same tokens, bit for bit, also from an engine that was started anew."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from test_gateway import ENV_KEY, settings_for

from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.host.processes.fork_parent import ForkParent
from invrl.store.run_store import RunStore
from invrl.types.sessions import Session

pytestmark = pytest.mark.slow

QUESTIONS = ("What is 12*13?", "Sure? Explain.", "And in words?")
ALONE = {"disable-radix-cache": "true", "max-running-requests": "1"}
"""What bit equality needs of SGLang."""
Sampled = list[tuple[list[int], bytes]]
"""Ids and log-probs (float32, as bytes) of a session's turns."""


@dataclass(frozen=True)
class Served:
    """A gateway in front of a fleet of one."""

    http: httpx.AsyncClient
    store: RunStore

    async def rollout(
        self, group: str, *, index: int = 0, attempt: int = 0, **client: int
    ) -> Sampled:
        """A session of three turns at one place of the run."""
        member = {"index": index, "attempt": attempt}
        body = {"task_id": "t", "group_id": group, "members": [member]}
        opened = await self.http.post("/sessions", json=body)
        assert opened.status_code == 201, opened.text
        [session] = msgspec.json.decode(opened.content, type=dict[str, list[Session]])[
            "sessions"
        ]
        messages: list = []
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key, max_retries=0
        ) as agent:
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                answer = await agent.chat.completions.create(
                    model="tiny", messages=messages, **client
                )
                messages.append(
                    {"role": "assistant", "content": answer.choices[0].message.content}
                )
        finished = await self.http.post(
            f"/sessions/{session.id}/finish", json={"reward": 1.0}
        )
        assert finished.status_code == 200, finished.text
        return [
            (turn.sampled_ids_T.tolist(), turn.logprobs_T.tobytes())
            for turn in self.store.turns(session.id)
        ]

    async def places(self, concurrency: int = 1) -> list[Sampled]:
        """Six rollouts of two groups."""
        room = asyncio.Semaphore(concurrency)

        async def one(group: str, index: int) -> Sampled:
            async with room:
                return await self.rollout(group, index=index)

        return await asyncio.gather(
            *(one(group, index) for group in "ab" for index in range(3))
        )


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    model: Path,
    parent: ForkParent,
    sglang: Mapping[str, str] = ALONE,
    run_seed: int = 5,
) -> AsyncIterator[Served]:
    config = EngineConfig(dtype="float32", start_timeout_s=500.0, seeded_sampling=True)
    fleet = Fleet(config, model, folder, sglang=sglang, parent=parent)
    await fleet.start()
    try:
        await fleet.admit()
        settings = settings_for(fleet, model, folder, sampling_seed=run_seed)
        gateway = GatewayServer(
            settings,
            folder=folder / "private",
            log=folder / "gateway.log",
            parent=parent,
        )
        try:
            await asyncio.to_thread(gateway.wait_ready, deadline_s=120)
            headers = {"authorization": f"Bearer {ENV_KEY}"}
            async with httpx.AsyncClient(
                base_url=gateway.url, headers=headers, timeout=120
            ) as http:
                yield Served(http, RunStore(folder / "run.db"))
        finally:
            gateway.stop()
    finally:
        await fleet.stop()


async def test_seeded_rollout_samples_the_same_tokens_after_a_restart(
    tmp_path: Path, tiny_model: Path, engine_parent: ForkParent
) -> None:
    async with serve(tmp_path / "first", tiny_model, engine_parent) as served:
        before = await served.places()
        again = await served.rollout("a", attempt=1)
        clients = await served.rollout("a", seed=1234)
    ids = [str([turn[0] for turn in rollout]) for rollout in [*before, again]]
    assert len(set(ids)) == 7  # members, groups and attempts differ
    assert all(len(rollout) == len(QUESTIONS) for rollout in before)
    assert clients == before[0]  # in training a client's own seed does not count
    async with serve(tmp_path / "second", tiny_model, engine_parent) as served:
        # in another order: what counts is the place
        assert await served.rollout("a", attempt=1) == again
        assert await served.places() == before
