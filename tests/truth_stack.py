"""A gateway whose engine is tapped: gateway process -> real router -> tap -> scripted
or real engine.

`scripted_stack` starts all of it; `real_stack` puts the tap before the engine of a
fleet that runs. Both yield a `Stack`, which opens sessions and at the end gives the
verdict of `token_truth.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from engine_tap import EngineTap
from scripted_engine import ScriptedEngine, TextScript
from token_truth import Reference, Sent, Verdict, judge, stored_turns

from invrl.engines.fleet.fleet import Fleet
from invrl.engines.router.router_server import RouterServer
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.gateway.server.settings import GatewaySettings
from invrl.host.network.ports import free_port
from invrl.host.processes.fork_parent import ForkParent

ENV_KEY = "env-0123456789abcdef"
MODEL_NAME = "scripted"


@dataclass(slots=True, kw_only=True)
class Stack:
    """A running gateway, and what stands behind it."""

    settings: GatewaySettings
    tap: EngineTap
    engine: ScriptedEngine | None
    """None: a real one."""
    model: Path

    @property
    def url(self) -> str:
        return self.settings.url

    async def env(self, path: str, body: Mapping[str, object]) -> dict:
        headers = {"authorization": f"Bearer {ENV_KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(self.url + path, json=body) as answer,
        ):
            assert answer.status in (200, 201), await answer.text()
            return dict(await answer.json())

    async def open(self, *, group: str = "g", **body: object) -> dict:
        """The session as the API shows it: `id`, `key`, `base_url`."""
        payload = {
            "task_id": "t",
            "group_id": group,
            "members": [{"index": 0, "attempt": 0}],
            **body,
        }
        return (await self.env("/sessions", payload))["sessions"][0]

    async def view(self, session: Mapping) -> dict:
        """`GET /sessions/ID`."""
        headers = {"authorization": f"Bearer {session['key']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.get(f"{self.url}/sessions/{session['id']}") as answer,
        ):
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    async def finish(self, session: Mapping, reward: float = 1.0) -> dict:
        return await self.env(f"/sessions/{session['id']}/finish", {"reward": reward})

    async def verdict(
        self,
        sent: Collection[Sent] = (),
        *,
        session_ids: Collection[str] = (),
        unthinking: Collection[str] = (),
    ) -> Verdict:
        """Over all turns so far, or those of some sessions. Waits until the wire is
        quiet. `unthinking`: the sessions that refuse thinking."""
        async with asyncio.timeout(60):
            while not self.tap.quiet:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert self.tap.unreadable == []
        turns = stored_turns(Path(self.settings.store_path))
        if session_ids:
            turns = [turn for turn in turns if turn.session_id in session_ids]
        wire = self.tap.generations
        return await asyncio.to_thread(
            judge,
            turns,
            wire,
            Reference(self.model),
            sent=sent,
            all_turns=not session_ids,
            unthinking=unthinking,
        )


@contextlib.asynccontextmanager
async def scripted_stack(
    folder: Path,
    model: Path,
    script: TextScript,
    *,
    token_delay_s: float = 0.0,
    parent: ForkParent | None = None,
    **changes: object,
) -> AsyncIterator[Stack]:
    """`parent`: of the gateway's process. `changes`: of its settings."""
    async with contextlib.AsyncExitStack() as stack:
        engine = ScriptedEngine(script, model, token_delay_s=token_delay_s)
        await stack.enter_async_context(engine)
        tap = await stack.enter_async_context(EngineTap(engine.url))
        router = RouterServer(run_folder=folder, start_timeout_s=240)
        stack.push_async_callback(asyncio.to_thread, router.stop)
        await asyncio.to_thread(router.wait_ready)
        await asyncio.to_thread(router.register, tap.url, api_key="engine-key")
        tokens = {"context_length": 200_000, "vocab_size": engine.vocab_size}
        async with _gateway(
            folder, model, router, parent, **{**tokens, **changes}
        ) as settings:
            yield Stack(settings=settings, tap=tap, engine=engine, model=model)


@contextlib.asynccontextmanager
async def real_stack(
    folder: Path, model: Path, fleet: Fleet, name: str = "engine-0", **changes: object
) -> AsyncIterator[Stack]:
    """The router reaches the engine through the tap for as long as this lasts."""
    engine = fleet.engines[name].server
    router = fleet.router
    limits = {
        "context_length": fleet.limits.context_length,
        "vocab_size": fleet.limits.vocab_size,
    }
    async with EngineTap(engine.url) as tap:
        await asyncio.to_thread(router.unregister, engine.url)
        await asyncio.to_thread(router.register, tap.url, api_key=engine.api_key)
        try:
            async with _gateway(
                folder, model, router, fleet.fork_parent, **{**limits, **changes}
            ) as settings:
                yield Stack(settings=settings, tap=tap, engine=None, model=model)
        finally:
            await asyncio.to_thread(router.unregister, tap.url)
            await asyncio.to_thread(router.register, engine.url, api_key=engine.api_key)


@contextlib.asynccontextmanager
async def _gateway(
    folder: Path,
    model: Path,
    router: RouterServer,
    parent: ForkParent | None,
    **changes: object,
) -> AsyncIterator[GatewaySettings]:
    values = {
        "run_id": "truth",
        "port": free_port(),
        "router_url": router.url,
        "router_api_key": router.api_key,
        "env_key": ENV_KEY,
        "model_path": str(model),
        "model_name": MODEL_NAME,
        "store_path": str(folder / "run.sqlite"),
        "max_new_tokens": 2048,
        "tool_call_parser": "auto",
        "reasoning_parser": "auto",
        "constrained": "skip",
        **changes,
    }
    settings = GatewaySettings.model_validate(values)
    server = GatewayServer(
        settings,
        folder=folder / "private",
        log=folder / "gateway.log",
        parent=parent,
    )
    try:
        await asyncio.to_thread(server.wait_ready, deadline_s=120)
        yield settings
    finally:
        await asyncio.to_thread(server.stop)
