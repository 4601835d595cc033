"""The gateway's processes stopped (SIGSTOP) or hung: noticed, named, replaced, and the
sessions go on."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from fakes import FakeEngine, random_reply
from gateway_processes import (
    GROUP,
    TURNS,
    Agent,
    check_exact,
    open_sessions,
    serving,
    settings_for,
    until,
    workers,
)
from slow_cases import first_quick

from invrl.gateway.rendering.loading import load_renderer
from invrl.gateway.server.processes.gateway_server import GatewayServer
from invrl.host.processes.process import still_running
from invrl.store.run_store import RunStore

TIMEOUT_S = 2.0


async def talk(
    server: GatewayServer,
    folder: Path,
    engine: FakeEngine,
    model: Path,
    *,
    sessions: int,
) -> None:
    """Conversations of `sessions` sessions, each to its end, with exact tokens."""
    opened = await open_sessions(server, sessions)
    async with httpx.AsyncClient(
        limits=httpx.Limits(max_connections=None), timeout=240
    ) as http:
        agents = [Agent(number, session, http) for number, session in enumerate(opened)]
        await asyncio.gather(*(agent.run() for agent in agents))
    store = RunStore(folder / "run.db")
    encode = load_renderer(str(model), 512)._tokenizer.encode
    for agent in agents:
        await check_exact(agent, engine, store, encode)


@pytest.mark.parametrize("number", first_quick([0, 1]))
async def test_stopped_gateway_worker_is_replaced_and_its_sessions_continue(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, number: int
):
    async with FakeEngine(random_reply(tokens=6)) as engine:
        settings = settings_for(engine, tiny_model, tmp_path, workers=2)
        settings = settings.model_copy(update={"heartbeat_timeout_s": TIMEOUT_S})
        async with (
            serving(settings, tmp_path) as server,
            httpx.AsyncClient(timeout=120) as http,
        ):
            await until(lambda: len(workers(server)) == 2)
            # in the order of their forks
            before = sorted(workers(server), key=lambda process: process.pid)
            sessions = await open_sessions(server, 2 * GROUP)
            owned = [
                session
                for session in sessions
                if session.id.startswith(f"ses-0{number}")
            ]
            victim = before[number]
            supervisor = server.process.pid
            os.kill(victim.pid, signal.SIGSTOP)
            agent = Agent(0, (owned or sessions)[0], http)
            await agent.run()
            await until(
                lambda: victim not in workers(server) and len(workers(server)) == 2
            )
            [other] = [process for process in before if process != victim]
            assert other in workers(server), "only who was silent is replaced"
            assert server.process.pid == supervisor
            log = (tmp_path / "gateway.log").read_text()
            assert (
                f"worker {number} (process {victim.pid}) showed no sign of life for 2 s"
                in log
            )
            assert "run.heartbeat_timeout_s" in log
            told = f"worker {number} of the gateway showed no sign of life for 2 s"
            await until(lambda: told in caplog.text)
            assert len(set(agent.acknowledged)) == TURNS
            await talk(server, tmp_path, engine, tiny_model, sessions=GROUP)


async def test_stopped_gateway_supervisor_is_named_and_replaced(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    async with FakeEngine(random_reply(tokens=6)) as engine:
        settings = settings_for(engine, tiny_model, tmp_path, workers=2)
        settings = settings.model_copy(update={"heartbeat_timeout_s": TIMEOUT_S})
        async with serving(settings, tmp_path) as server:
            await until(lambda: len(workers(server)) == 2)
            [session, *_] = await open_sessions(server, GROUP)
            old = psutil.Process(server.process.pid)
            family = [old, *old.children()]
            os.kill(old.pid, signal.SIGSTOP)
            await until(lambda: server.process.pid != old.pid)
            assert (
                f"the gateway's supervisor (process {old.pid}) showed no sign of life for 2 s"
                in caplog.text
            )
            assert await asyncio.to_thread(still_running, family, within_s=60) == []
            await asyncio.to_thread(server.wait_ready, deadline_s=120)
            async with httpx.AsyncClient(timeout=120) as http:
                await Agent(0, session, http).run()


async def test_gateway_worker_with_a_hung_event_loop_is_replaced(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It lives, and no signal tells: only its beats stop."""
    monkeypatch.setattr(GatewayServer, "module", "dying_gateway")
    here = str(Path(__file__).parent)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    monkeypatch.setenv("DIED_ONCE", str(tmp_path / "hung"))
    monkeypatch.setenv("INSTEAD_OF_DYING", "hang")
    async with FakeEngine(random_reply(tokens=6)) as engine:
        settings = settings_for(engine, tiny_model, tmp_path)
        settings = settings.model_copy(update={"heartbeat_timeout_s": TIMEOUT_S})
        async with serving(settings, tmp_path) as server:
            [session, *_] = await open_sessions(server, GROUP)
            async with httpx.AsyncClient(timeout=120) as http:
                agent = Agent(0, session, http)
                await agent.run()
            assert (tmp_path / "hung").exists()
            assert "worker 0 (process" in (tmp_path / "gateway.log").read_text()
            [first, *_] = RunStore(tmp_path / "run.db").turns(session.id)
            assert agent.acknowledged[0] == first.id, (
                "the turn that was committed before it hung"
            )
