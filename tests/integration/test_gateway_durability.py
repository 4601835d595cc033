"""The gateway's processes under kill -9: every session goes on with its exact tokens,
no acknowledged turn is missing, and what connects meanwhile only waits. The engine is
scripted; its own log of ids is the tap."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import httpx
import psutil
import pytest
from fakes import FakeEngine, random_reply
from gateway_processes import (
    ENV_KEY,
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
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.run_store import RunStore
from invrl.types.rollouts import RolloutSummary


@pytest.mark.parametrize("num_sessions", first_quick([64, 200]))
async def test_live_sessions_survive_the_death_of_a_worker_and_of_the_supervisor(
    tiny_model: Path, tmp_path: Path, num_sessions: int
):
    limits = httpx.Limits(max_connections=None)
    async with FakeEngine(random_reply(tokens=14), token_delay_s=0.08) as engine:
        settings = settings_for(engine, tiny_model, tmp_path, workers=2)
        async with (
            serving(settings, tmp_path) as server,
            httpx.AsyncClient(limits=limits, timeout=120) as http,
        ):
            sessions = await open_sessions(server, num_sessions)
            assert {session.id[4:6] for session in sessions} == {"00", "01"}
            agents = [
                Agent(number, session, http) for number, session in enumerate(sessions)
            ]
            no_more_kills = asyncio.Event()
            for agent in agents:
                agent.no_more_kills = no_more_kills
            running = asyncio.gather(*(agent.run() for agent in agents))

            def everyone_has(turns: int) -> bool:
                return running.done() or all(
                    len(agent.acknowledged) >= turns for agent in agents
                )

            await until(lambda: everyone_has(1))
            [victim, other] = workers(server)
            victim.kill()
            await until(lambda: everyone_has(2))
            await until(lambda: len(workers(server)) == 2)
            assert other in workers(server)
            assert victim not in workers(server)
            old = server.process.pid
            os.kill(old, signal.SIGKILL)
            await until(lambda: running.done() or server.process.pid != old)
            no_more_kills.set()
            async with asyncio.timeout(400):
                await running
            store = RunStore(tmp_path / "run.db")
            encode = load_renderer(str(tiny_model), 512)._tokenizer.encode
            for agent in agents:
                await check_exact(agent, engine, store, encode)
            assert any(agent.broken for agent in agents), (
                "the kills must have met streams"
            )
            metrics = await http.get(
                server.url + "/metrics", headers={"authorization": f"Bearer {ENV_KEY}"}
            )
            assert metrics.json()["sessions"]["open"] == num_sessions
            client = SessionClient(server.url)
            for agent in agents:
                outcome = await client.finish(agent.session, 1.0)
                assert isinstance(outcome, RolloutSummary)
                sampled = sum(
                    len(engine.replies[turn_id]) for turn_id in agent.acknowledged
                )
                assert (outcome.forks, outcome.trained_tokens) == (0, sampled)
            victim = workers(server)[0]
            victim.kill()
            again = [await client.finish(agents[0].session, 1.0) for _ in range(2)]
            assert again[0] == again[1]
            await client.close()
    place = str(tmp_path)
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if place in " ".join(p.info["cmdline"] or [])
    ]
    assert still_running(left, within_s=60) == []


@pytest.mark.parametrize("stream", first_quick([True, False]))
async def test_client_gets_the_turn_that_was_committed_just_before_the_worker_died(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    monkeypatch.setattr(GatewayServer, "module", "dying_gateway")
    here = str(Path(__file__).parent)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    monkeypatch.setenv("DIED_ONCE", str(tmp_path / "died"))
    async with FakeEngine(random_reply(tokens=6)) as engine:
        settings = settings_for(engine, tiny_model, tmp_path)
        async with serving(settings, tmp_path) as server:
            [session, *_] = await open_sessions(server, GROUP)
            async with httpx.AsyncClient(timeout=120) as http:
                agent = Agent(0, session, http)
                agent.stream = stream
                await agent.run()
            assert (tmp_path / "died").exists()
            [first, *_] = RunStore(tmp_path / "run.db").turns(session.id)
            assert agent.acknowledged[0] == first.id
            assert len(engine.requests) == TURNS
            store = RunStore(tmp_path / "run.db")
            encode = load_renderer(str(tiny_model), 512)._tokenizer.encode
            await check_exact(agent, engine, store, encode)


async def test_gateway_that_cannot_load_its_model_reports_the_reason(
    tiny_model: Path, tmp_path: Path
):
    async with FakeEngine(random_reply()) as engine:
        settings = settings_for(engine, tmp_path / "no-model", tmp_path)
        server = GatewayServer(settings, folder=tmp_path, log=tmp_path / "gateway.log")
        try:
            with pytest.raises(Exception, match=r"tokenizer\.json"):
                await asyncio.to_thread(server.wait_ready, deadline_s=120)
        finally:
            await asyncio.to_thread(server.stop)


async def test_no_gateway_process_outlives_its_starter(
    tiny_model: Path, tmp_path: Path
):
    async with FakeEngine(random_reply()) as engine:
        (tmp_path / "settings.json").write_text(
            settings_for(engine, tiny_model, tmp_path, workers=2).to_json()
        )
        program = textwrap.dedent(f"""
            import json, pathlib, time
            from invrl.gateway.server.processes.gateway_server import GatewayServer, GatewaySettings
            folder = pathlib.Path({str(tmp_path)!r})
            settings = GatewaySettings.model_validate(json.loads((folder / "settings.json").read_text()))
            server = GatewayServer(settings, folder=folder, log=folder / "gateway.log")
            server.wait_ready(deadline_s=120)
            print(server.process.pid, flush=True)
            time.sleep(600)
        """)
        holder = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        supervisor = psutil.Process(
            int(await asyncio.to_thread(holder.stdout.readline))
        )
        await until(lambda: len(supervisor.children()) == 2)  # one of them answers
        family = [supervisor, *supervisor.children()]
        holder.kill()
        holder.wait(60)
        assert await asyncio.to_thread(still_running, family, within_s=60) == []
