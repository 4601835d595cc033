"""An engine on another node, with an agent that is a fake: its start where a node is,
its end, and what becomes of it when the node dies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from invrl.engines.client.sglang_client import EngineLimits, SglangClient
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.engine_health import Clock, engine_death
from invrl.engines.launch import hosted_engine
from invrl.engines.launch.engine_agent_actor import EngineAddress, EngineStart
from invrl.engines.launch.engine_hosts import EngineHost
from invrl.engines.launch.hosted_engine import HostedEngine
from invrl.errors import ActorDiedError, DeadlineError, ServerError
from invrl.host.ray import actor
from invrl.host.ray.actor import ActorOptions

ADDRESS = EngineAddress(url="http://10.0.0.2:1", admin_key="admin", api_key="sampler")
HOST = EngineHost(node_id="id-b", name="b", address="10.0.0.2", num_gpus=1)


class FakeAgent:
    """Replies by the name of the method; an exception is raised."""

    def __init__(self, **replies: Any) -> None:
        self.replies = {"launch": ADDRESS, "wait_ready": None, "stop": None, **replies}
        self.calls: list[str] = []
        self.killed = False

    async def call(
        self, method: Callable[..., Awaitable[Any]], deadline_s: float
    ) -> Any:
        self.calls.append(method.__name__)
        reply = self.replies[method.__name__]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def kill(self) -> None:
        self.killed = True


class FakeHosts:
    """Has these hosts, one after the other."""

    description = "a node"

    def __init__(self, *hosts: EngineHost | None) -> None:
        self.hosts = list(hosts)

    def host_of(self, engine: str) -> EngineHost | None:
        return self.hosts.pop(0) if len(self.hosts) > 1 else self.hosts[0]


class Started:
    """Agents that start in this order, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agents: list[FakeAgent] = []
        self.options: list[ActorOptions] = []
        self.addresses: list[str] = []
        monkeypatch.setattr(hosted_engine, "_POLL_INTERVAL_S", 0.01)
        monkeypatch.setattr(actor, "start_actor", self.start)

    def start(
        self,
        name: str,
        role: object,
        options: ActorOptions,
        start: object,
        address: str,
    ) -> FakeAgent:
        self.options.append(options)
        self.addresses.append(address)
        return self.agents[len(self.options) - 1]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def engine(*hosts: EngineHost | None, timeout_s: float = 30.0) -> HostedEngine:
    start = EngineStart(
        name="engine-0",
        config=EngineConfig.model_validate({"start_timeout_s": timeout_s}),
        model_path=Path("model"),
        run_folder=Path("run"),
        passthrough=(),
        api_key=None,
        log=None,
    )
    return HostedEngine(start, FakeHosts(*hosts))


def test_engine_starts_on_its_node_with_the_nodes_gpus(started: Started) -> None:
    started.agents = [FakeAgent()]
    hosted = engine(None, HOST)
    hosted.wait_ready()
    assert started.options == [ActorOptions(node="id-b", num_gpus=1)]
    assert started.addresses == ["10.0.0.2"]
    assert (hosted.url, hosted.api_key, hosted.admin_key) == (
        "http://10.0.0.2:1",
        "sampler",
        "admin",
    )
    hosted.stop()
    hosted.stop()
    assert started.agents[0].calls == ["launch", "wait_ready", "stop"]
    assert started.agents[0].killed


def test_node_that_leaves_while_its_engine_loads_is_replaced(started: Started) -> None:
    gone = FakeAgent(wait_ready=ActorDiedError("gone"), stop=ActorDiedError("gone"))
    started.agents = [gone, FakeAgent()]
    hosted = engine(HOST)
    hosted.wait_ready()
    assert gone.killed
    assert hosted.url == ADDRESS.url


def test_engine_that_died_is_not_tried_elsewhere(started: Started) -> None:
    failing = FakeAgent(wait_ready=ServerError("its log"), lost_its_port=True)
    started.agents = [failing]
    hosted = engine(HOST)
    with pytest.raises(ServerError, match="its log"):
        hosted.wait_ready()
    assert hosted.lost_its_port()
    assert failing.killed


def test_missing_node_is_named_after_the_deadline(started: Started) -> None:
    with pytest.raises(DeadlineError, match="a node, for engine-0"):
        engine(None, timeout_s=0.05).wait_ready()


def test_stop_ends_the_wait_for_a_node(started: Started) -> None:
    hosted = engine(None)
    failures: list[Exception] = []

    def wait() -> None:
        try:
            hosted.wait_ready()
        except ServerError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    hosted.stop()
    waiting.join(10)
    assert "not started any more" in str(failures[0])


def test_agent_that_starts_while_the_engine_is_stopped_is_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent(lost_its_port=False)
    hosted = engine(HOST)

    def stop_before_it_is_known(*arguments: object) -> FakeAgent:
        stopping = threading.Thread(target=hosted.stop)
        stopping.start()
        stopping.join(10)
        return agent

    monkeypatch.setattr(actor, "start_actor", stop_before_it_is_known)
    with pytest.raises(ServerError, match="not started any more"):
        hosted.wait_ready()
    assert agent.calls == ["lost_its_port", "stop"]
    assert agent.killed


class Quiet:
    """A client that answers, and a receiver that does nothing."""

    is_paused = False
    is_loading = False

    async def answers(self, *, deadline_s: float) -> bool:
        return True

    async def generates(self, *, deadline_s: float) -> bool:
        return True


async def test_death_of_the_agent_is_the_engines(started: Started) -> None:
    started.agents = [FakeAgent(until_ended=ActorDiedError("the node died"))]
    hosted = engine(HOST)
    await asyncio.to_thread(hosted.wait_ready)
    death = engine_death(
        hosted.processes(),
        Quiet(),
        Quiet(),
        timeout_s=60.0,
        interval_s=60.0,
        elsewhere=hosted.until_ended,
        clock=Clock(),
    )
    assert "on its node" in await asyncio.wait_for(death, 10)


async def test_broken_connection_to_the_agent_is_not_the_engines_death(
    started: Started,
) -> None:
    broken = ActorDiedError("socket closed")
    broken.__cause__ = ActorUnavailableError("socket closed", None)
    agent = FakeAgent(until_ended=broken)
    started.agents = [agent]
    hosted = engine(HOST)
    await asyncio.to_thread(hosted.wait_ready)
    ended = asyncio.create_task(hosted.until_ended())
    while agent.calls.count("until_ended") < 3:
        await asyncio.sleep(0.01)
    assert not ended.done()
    agent.replies["until_ended"] = "the engine has ended"
    await asyncio.wait_for(ended, 10)


async def test_client_moves_to_the_address_of_an_engine_that_is_up() -> None:
    limits = EngineLimits(vocab_size=8, context_length=8)
    async with SglangClient("", limits=limits, name="engine-0") as client:
        client.reach("http://10.0.0.2:1", api_key="sampler", admin_key="admin")
        assert client.base_url == "http://10.0.0.2:1"
        assert client.api_key == "sampler"
