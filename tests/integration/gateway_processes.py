"""A gateway's processes on a fake engine, and agents that talk to them while the
processes die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import psutil
from fakes import FakeEngine

from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.run_store import RunStore
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Session
from invrl.types.tasks import Task

ENV_KEY = "env-0123456789abcdef"


GROUP = 4
TURNS = 5


BROKEN = (openai.APIConnectionError, httpx.TransportError)


def settings_for(
    engine: FakeEngine, model: Path, folder: Path, **changes: object
) -> GatewaySettings:
    values = {
        "tool_call_parser": "none",
        "reasoning_parser": "none",
        "port": free_port(),
        "router_url": engine.url,
        "env_key": ENV_KEY,
        "model_path": str(model),
        "model_name": "tiny",
        "store_path": str(folder / "run.db"),
        "max_new_tokens": 64,
        "context_length": 4096,
        "vocab_size": 512,
        **changes,
    }
    return GatewaySettings.model_validate(values)


@contextlib.asynccontextmanager
async def serving(
    settings: GatewaySettings, folder: Path
) -> AsyncIterator[GatewayServer]:
    """Watched as the cluster does it."""
    server = GatewayServer(
        settings, folder=folder / "private", log=folder / "gateway.log"
    )

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.2)
            server.check_alive()

    watching = asyncio.create_task(watch())
    try:
        await asyncio.to_thread(server.wait_ready, deadline_s=120)
        yield server
        assert not watching.done(), watching.exception()
    finally:
        watching.cancel()
        await asyncio.to_thread(server.stop)


def workers(server: GatewayServer) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


async def open_sessions(server: GatewayServer, count: int) -> list[Session]:
    client = SessionClient(server.url, env_key=ENV_KEY)
    sessions = []
    for number in range(count // GROUP):
        members = tuple(GroupMember(index=index, attempt=0) for index in range(GROUP))
        lease = GroupLease(
            group_id=f"g{number}",
            task=Task(id=f"t{number}", payload={}),
            members=members,
        )
        sessions += await client.open(lease)
    await client.close()
    return sessions


class Agent:
    """A conversation of `TURNS` turns with the official client and its own retries; a
    stream that breaks off is asked for again, as any agent does."""

    patience = 5

    def __init__(self, number: int, session: Session, http: httpx.AsyncClient) -> None:
        self.number, self.session, self.stream = number, session, number % 2 == 0
        self.client = openai.AsyncOpenAI(
            base_url=session.base_url,
            api_key=session.key,
            http_client=http,
            timeout=240,
        )
        self.messages: list = []
        self.acknowledged: list[str] = []
        self.broken = 0
        self.no_more_kills: asyncio.Event | None = None
        """Awaited before the last turn. Of the others the store knows that they
        arrived, since the next one goes on from them; of the last one only if nobody is
        killed between its last byte and that mark."""

    async def run(self) -> None:
        for turn in range(TURNS):
            if turn == TURNS - 1 and self.no_more_kills is not None:
                await self.no_more_kills.wait()
            self.messages.append(
                {"role": "user", "content": f"session {self.number}, question {turn}"}
            )
            turn_id, text = await self._ask()
            self.acknowledged.append(turn_id.removeprefix("chatcmpl-"))
            self.messages.append({"role": "assistant", "content": text})

    async def _ask(self) -> tuple[str, str]:
        create = self.client.chat.completions.create
        if not self.stream:
            answer = await create(model="tiny", messages=self.messages)
            return answer.id, answer.choices[0].message.content or ""
        while True:
            try:
                events = [
                    event
                    async for event in await create(
                        model="tiny", messages=self.messages, stream=True
                    )
                ]
            except BROKEN:
                self.broken += 1
                assert self.broken < self.patience
                continue
            return events[0].id, "".join(
                event.choices[0].delta.content or "" for event in events
            )


async def until(condition, seconds: float = 240.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def check_exact(
    agent: Agent, engine: FakeEngine, store: RunStore, encode
) -> None:
    """What the engine was sent and answered, against what agent and store hold. That an
    answer arrived is written behind its last byte."""
    answered = set(agent.acknowledged)
    await until(
        lambda: (
            answered
            <= {turn.id for turn in store.turns(agent.session.id) if turn.delivered}
        ),
        30,
    )
    prompts = {body["rid"]: body["input_ids"] for body in engine.requests}
    replies = dict(engine.replies)
    assert len(set(agent.acknowledged)) == TURNS
    recorded = {turn.id: turn for turn in store.turns(agent.session.id)}
    before: list[int] = []
    for place, turn_id in enumerate(agent.acknowledged):
        question = f"session {agent.number}, question {place}"
        tail = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        if place:
            tail = ("\n" if before[-1] == 2 else "<|im_end|>\n") + tail
        assert prompts[turn_id] == before + encode(tail)
        before = prompts[turn_id] + replies[turn_id]
        assert recorded[turn_id].sampled_ids_T.tolist() == replies[turn_id]
