"""A gateway in this process on a fake engine, and what tests say to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import openai
import uvicorn
from fakes import FakeEngine, random_reply

from invrl.engines.client.routed_experts import ExpertsShape
from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.server.http.http_protocol import LimitedHttpProtocol
from invrl.gateway.server.routes.app import make_app
from invrl.gateway.server.settings import GatewaySettings
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.fleet import FleetSnapshot
from invrl.types.rollouts import FailedRollout, RolloutSummary
from invrl.types.sessions import Session
from invrl.types.turns import Turn

ENV_KEY = "env-0123456789abcdef"


ASK = {"role": "user", "content": "What is 12*13?"}


MORE = {"role": "user", "content": "Sure? ünïcödé 🙂"}


@dataclass
class Running:
    """A gateway on a fake engine."""

    url: str
    engine: FakeEngine
    store: RunStore
    http: httpx.AsyncClient

    async def open(self, members: int = 1, **body: object) -> list[Session]:
        payload = {
            "task_id": "t",
            "group_id": "g",
            "members": [{"index": i, "attempt": 0} for i in range(members)],
            **body,
        }
        answer = await self.env("/sessions", payload)
        assert answer.status_code == 201, answer.text
        return msgspec.json.decode(answer.content, type=dict[str, list[Session]])[
            "sessions"
        ]

    async def env(
        self, path: str, body: Mapping[str, object] | None = None, key: str = ENV_KEY
    ):
        headers = {"authorization": f"Bearer {key}"}
        if body is None:
            return await self.http.get(self.url + path, headers=headers)
        return await self.http.post(self.url + path, json=body, headers=headers)

    async def finish(
        self, session: Session, reward: float = 1.0
    ) -> RolloutSummary | FailedRollout:
        answer = await self.env(
            f"/sessions/{session.id}/finish", {"reward": reward}, key=session.key
        )
        assert answer.status_code == 200, answer.text
        kind = FailedRollout if "reason" in answer.json() else RolloutSummary
        return msgspec.json.decode(answer.content, type=kind)

    def turns(self, session: Session) -> list[Turn]:
        return self.store.turns(session.id)

    def client(self, session: Session, **options) -> openai.AsyncOpenAI:
        options = {
            "max_retries": 0,
            "api_key": "placeholder",
            "base_url": session.base_url,
            # Certificates, which nobody asks for here, take 40 ms to load.
            "http_client": openai.DefaultAsyncHttpxClient(verify=False),
        } | options
        return openai.AsyncOpenAI(**options)


@contextlib.asynccontextmanager
async def running(
    tmp_path: Path,
    model: Path,
    renderer: Renderer,
    parsers: Parsers | None = None,
    place: WorkerPlace | None = None,
    run_ended: Callable[[], bool] = lambda: False,
    experts: ExpertsShape | None = None,
    eval_engine: FakeEngine | None = None,
    read_fleet: Callable[[], FleetSnapshot] = FleetSnapshot,
    **changes,
) -> AsyncIterator[Running]:
    parsers = parsers or Parsers()
    parsers.preload()  # as the gateway does: seconds, in which no deadline must run
    async with (
        FakeEngine(random_reply()) as engine,
        httpx.AsyncClient(timeout=120, verify=False) as http,
    ):
        listener = socket.create_server(("127.0.0.1", 0))
        settings = GatewaySettings.model_validate(
            {
                "port": listener.getsockname()[1],
                "router_url": engine.url,
                "env_key": ENV_KEY,
                "model_path": str(model),
                "model_name": "tiny",
                "store_path": str(tmp_path / "run.db"),
                "max_new_tokens": 64,
                "context_length": 1024,
                "vocab_size": 512,
                "session": {"generate_timeout_s": 120.0},
                **changes,
            }
        )
        store = RunStoreWriter(Path(settings.store_path))
        limits = EngineLimits(vocab_size=512, context_length=settings.context_length)
        client = SglangClient(
            settings.router_url,
            limits=limits,
            generate_deadline_s=settings.session.generate_timeout_s,
            experts=experts,
        )
        eval_client = None
        if eval_engine is not None:
            eval_client = SglangClient(eval_engine.url, limits=limits)
        app = make_app(
            settings,
            sampler=client,
            eval_sampler=eval_client,
            read_fleet=read_fleet,
            renderer=renderer,
            parsers=parsers,
            store=store,
            place=place,
            on_shutdown=client.close,
            run_ended=run_ended,
        )
        served = {
            "http": LimitedHttpProtocol,
            "timeout_graceful_shutdown": 1,
            "timeout_keep_alive": 600,
        }
        config = uvicorn.Config(app, port=settings.port, log_level="warning", **served)
        server = PromptServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(60):
                while not server.started:
                    await asyncio.sleep(0.01)
            yield Running(settings.url, engine, RunStore(tmp_path / "run.db"), http)
        finally:
            server.should_exit = True
            await serving
            if eval_client is not None:
                await eval_client.close()
            store.close()


class PromptServer(uvicorn.Server):
    """Ends as soon as it is told to: uvicorn looks for that ten times a second."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(0.005)


async def eventually(condition, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def edited_conversation(
    gateway: Running, session: Session, *, stream: bool
) -> None:
    """Three turns, then one that replaces the second question."""
    client = gateway.client(session)
    messages: list = [ASK]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, stream=stream
        )
        text = ""
        if stream:
            async for event in answer:
                text += event.choices[0].delta.content or "" if event.choices else ""
        else:
            text = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, MORE]
    other = [*messages[:2], {"role": "user", "content": "another question"}]
    await client.chat.completions.create(model="tiny", messages=other)
