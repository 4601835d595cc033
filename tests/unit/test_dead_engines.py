"""Engines leave and come back while updates go on: one engine's trouble stays its
own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from dying_fleet import (
    Deaths,
    FakeClient,
    FakeReceiver,
    FakeRouter,
    FakeServer,
    eventually,
    receiver,
)

from invrl.engines.config import EngineConfig
from invrl.engines.fleet import engine_restarts
from invrl.engines.fleet import fleet as fleet_module
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch import engine_launcher
from invrl.errors import ConfigError, ServerError
from invrl.host.output.incidents import incidents_shown
from invrl.host.processes.process import RestartLimit
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.weights import WeightVersion
from invrl.weights.config import WeightsConfig
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction


@pytest.fixture
def updater(fleet: Fleet) -> WeightUpdater:
    bound = CanaryBound(max_gap=0.1, mean_gap=0.1)
    transaction = WeightTransaction(
        FakeReceiver.trainer, fleet.receivers, canary_prompts=[[1, 2, 3]], bound=bound
    )
    return WeightUpdater(transaction, fleet)


async def test_call_that_moves_weights_has_the_deadline_of_its_phase(
    fleet: Fleet,
) -> None:
    assert {receiver(fleet, name).deadline_s for name in fleet.engines} == {900.0}


@pytest.mark.parametrize("phase", ["check", "pause", "load", "commit"])
async def test_update_continues_without_waiting_for_a_lost_engine(
    fleet: Fleet, updater: WeightUpdater, phase: str
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    receiver(fleet, "engine-1").fails = phase
    lost = fleet.engines["engine-1"].server
    FakeServer.may_be_ready.clear()  # its successor takes its time
    update = await updater.update(WeightVersion(2))
    assert list(update.lost_engines) == ["engine-1"]
    assert set(fleet.engines) == {"engine-0", "engine-2"}
    assert {receiver(fleet, name).weights for name in fleet.engines} == {"2"}
    fleet.check()
    await eventually(lambda: len(FakeServer.made) == 4)
    assert lost.stopped  # type: ignore[attr-defined]
    assert lost.url not in fleet.router.urls  # type: ignore[attr-defined]
    await updater.update(WeightVersion(3))
    FakeServer.may_be_ready.set()
    await eventually(lambda: len(fleet.engines) == 3)
    assert receiver(fleet, "engine-1").weights == "3"
    assert receiver(fleet, "engine-1").version == 3
    assert fleet.evicted == {}
    await eventually(
        lambda: fleet.router.registered(fleet.engines["engine-1"].server.url)
    )
    await updater.update(WeightVersion(4))
    assert {receiver(fleet, name).weights for name in fleet.engines} == {"4"}


async def test_engine_that_starts_while_weights_are_staged_takes_part_in_the_update(
    fleet: Fleet, updater: WeightUpdater
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    FakeReceiver.trainer.hold = asyncio.Event()
    update = asyncio.create_task(updater.update(WeightVersion(2)))
    await eventually(lambda: FakeReceiver.trainer.staged == [1, 2])
    fleet.evict("engine-1", "it died")
    await eventually(lambda: "engine-1" in fleet.engines)
    joining_engine = receiver(fleet, "engine-1")
    assert joining_engine.weights == "1"
    assert joining_engine.version == 1
    FakeReceiver.trainer.hold.set()
    await update
    assert joining_engine.weights == "2"
    assert joining_engine.version == 2


async def newcomer_that_loads(
    fleet: Fleet, name: str, goes_on: asyncio.Event
) -> FakeReceiver:
    """Evicts an engine; its successor waits in `load` until `goes_on`."""
    init = FakeReceiver.__init__

    def slow(
        self: FakeReceiver,
        name: str,
        client: object,
        settings: WeightsConfig,
        *,
        num_ranks: int,
    ) -> None:
        init(self, name, client, settings, num_ranks=num_ranks)
        self.load_waits = goes_on

    num_before = len(FakeReceiver.made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeReceiver, "__init__", slow)
        fleet.evict(name, "it died")
        await eventually(lambda: len(FakeReceiver.made) == num_before + 1)
    joining_engine = FakeReceiver.made[-1]
    await joining_engine.loading.wait()
    return joining_engine


async def test_updates_during_the_load_of_a_new_engine_do_not_overwrite_its_weights(
    fleet: Fleet, updater: WeightUpdater
) -> None:
    """Version 2 goes to the other slot. Version 3 would be written where the
    joining_engine reads version 1."""
    await updater.update(WeightVersion(1))
    await fleet.admit()
    goes_on = asyncio.Event()
    joining_engine = await newcomer_that_loads(fleet, "engine-1", goes_on)
    await updater.update(WeightVersion(2))
    assert "engine-1" not in fleet.engines
    third = asyncio.create_task(updater.update(WeightVersion(3)))
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert FakeReceiver.trainer.staged == [1, 2]
    goes_on.set()
    await third
    await eventually(lambda: "engine-1" in fleet.engines)
    assert receiver(fleet, "engine-1") is joining_engine
    assert {receiver(fleet, name).weights for name in fleet.engines} == {"3"}
    await eventually(
        lambda: fleet.router.registered(fleet.engines["engine-1"].server.url)
    )


async def test_new_engine_lost_by_an_update_before_its_registration_is_stopped(
    fleet: Fleet, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    may_register = threading.Event()
    register = FakeRouter.register

    def slow(self: FakeRouter, url: str, *, api_key: str) -> None:
        assert may_register.wait(120)
        register(self, url, api_key=api_key)

    monkeypatch.setattr(FakeRouter, "register", slow)
    fleet.evict("engine-1", "it died")
    await eventually(lambda: "engine-1" in fleet.engines)
    lost = fleet.engines["engine-1"].server
    receiver(fleet, "engine-1").fails = "load"
    update = await updater.update(WeightVersion(2))
    assert list(update.lost_engines) == ["engine-1"]
    may_register.set()
    await eventually(lambda: "engine-1" in fleet.engines)
    assert lost.stopped  # type: ignore[attr-defined]
    assert receiver(fleet, "engine-1").weights == "2"
    await eventually(lambda: len(fleet.router.urls) == 3)  # type: ignore[attr-defined]
    assert lost.url not in fleet.router.urls  # type: ignore[attr-defined]


async def test_new_engine_that_the_router_does_not_reach_is_evicted(
    fleet: Fleet, updater: WeightUpdater
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    FakeRouter.made[0].unreachable = {"http://engine-1-3"}
    fleet.evict("engine-1", "it died")
    await eventually(lambda: len(FakeServer.made) == 5 and "engine-1" in fleet.engines)
    assert FakeServer.made[3].stopped
    await eventually(
        lambda: fleet.router.registered(fleet.engines["engine-1"].server.url)
    )


async def test_engine_is_restarted_a_limited_number_of_times(
    fleet: Fleet, updater: WeightUpdater
) -> None:
    await updater.update(WeightVersion(1))
    with pytest.MonkeyPatch.context() as patch:
        # raises: it takes no such arguments
        patch.setattr(FakeReceiver, "check", FakeReceiver.commit)
        fleet.evict("engine-1", "it died")
        await eventually(fleet._replacements["engine-1"].done)
    assert len(FakeServer.made) == 5
    assert "did not come back" in fleet.evicted["engine-1"]
    assert all(server.stopped for server in FakeServer.made[3:])
    await updater.update(WeightVersion(2))
    await eventually(fleet._replacements["engine-1"].done)
    assert len(FakeServer.made) == 5
    fleet.check()


async def test_engine_evicted_before_the_first_version_returns_after_it(
    fleet: Fleet, updater: WeightUpdater
) -> None:
    fleet.evict("engine-2", "it died")
    await updater.update(WeightVersion(1))
    await eventually(lambda: "engine-2" in fleet.engines)
    assert receiver(fleet, "engine-2").weights == "1"


async def test_new_engine_that_dies_while_loading_does_not_hold_up_updates(
    fleet: Fleet, updater: WeightUpdater, deaths: Deaths
) -> None:
    await updater.update(WeightVersion(1))
    await newcomer_that_loads(fleet, "engine-1", asyncio.Event())
    deaths.future(FakeServer.made[3]).set_result("it hangs")
    await updater.update(WeightVersion(2))
    await updater.update(WeightVersion(3))
    await eventually(lambda: "engine-1" in fleet.engines)
    assert receiver(fleet, "engine-1") is FakeReceiver.made[4]
    assert FakeServer.made[3].stopped


async def test_failing_health_check_evicts_only_its_own_engine(
    fleet: Fleet, deaths: Deaths
) -> None:
    deaths.future(fleet.engines["engine-0"].server).set_exception(
        OSError("no more files")
    )
    await eventually(lambda: "engine-0" in fleet.evicted)
    assert "no more files" in fleet.evicted["engine-0"]
    deaths.future(fleet.engines["engine-2"].server).set_result("it is dead")
    await eventually(lambda: "engine-2" in fleet.evicted)
    assert set(fleet.engines) == {"engine-1"}
    fleet.check()
    deaths.future(fleet.engines["engine-1"].server).set_result("it is dead")
    await eventually(lambda: not fleet.engines)
    with pytest.raises(
        ServerError, match=r"no engine is left: engine-0.*engine-2.*engine-1"
    ):
        fleet.check()


async def test_engine_that_cannot_be_stopped_does_not_keep_other_engines_alive(
    fleet: Fleet, deaths: Deaths
) -> None:
    """SIGKILL does not end a process that waits for a disk."""
    servers = list(FakeServer.made)
    servers[0].cannot_stop = servers[1].cannot_stop = True
    deaths.future(servers[0]).set_result("it is dead")
    await eventually(lambda: servers[0].stopped)
    deaths.future(servers[2]).set_result("it is dead")
    await eventually(lambda: "engine-2" in fleet.evicted)
    fleet.check()
    await fleet.stop()
    assert all(server.stopped for server in servers)
    assert FakeRouter.made[0].stopped


async def test_engine_evicted_while_the_fleet_stops_is_stopped(fleet: Fleet) -> None:
    """What would have ended it is cancelled before it has begun."""
    fleet.evict("engine-0", "a test says so")
    await fleet.stop()
    assert [server.stopped for server in FakeServer.made] == [True, True, True]


async def test_client_that_fails_to_close_keeps_no_engine_alive(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close(self: FakeClient) -> None:
        raise OSError("it does not close")

    monkeypatch.setattr(FakeClient, "close", close)
    await fleet.stop()
    assert [server.stopped for server in FakeServer.made] == [True, True, True]


async def test_failure_of_an_engine_watch_is_raised(
    fleet: Fleet, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str, reason: str) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(fleet, "evict", broken)
    deaths.future(fleet.engines["engine-1"].server).set_result("it is dead")
    await eventually(fleet._watches.tasks["engine-1"].done)
    with pytest.raises(
        ServerError, match=r"nobody watches engine-1 any more.*a fault of ours"
    ):
        fleet.check()


async def test_dead_router_is_restarted_with_its_engines(
    fleet: Fleet, deaths: Deaths
) -> None:
    await fleet.admit()
    first = FakeRouter.made[0]
    fleet.evict("engine-2", "it died")
    await eventually(lambda: len(first.urls) == 2)
    deaths.future(first).set_result("it hangs")
    await eventually(
        lambda: len(FakeRouter.made) == 2 and len(FakeRouter.made[1].urls) == 2
    )
    assert first.stopped
    assert fleet.router is FakeRouter.made[1]
    assert FakeRouter.made[1].address is first.address
    assert FakeRouter.made[1].urls == {
        engine.server.url for engine in fleet.engines.values()
    }
    fleet.check()


async def test_restarted_router_gets_only_admitted_engines(
    fleet: Fleet, deaths: Deaths
) -> None:
    deaths.future(FakeRouter.made[0]).set_result("it hangs")
    await eventually(
        lambda: len(FakeRouter.made) == 2 and FakeRouter.made[1] in deaths.of
    )
    assert FakeRouter.made[1].urls == set(), (
        "it is watched, and no engine was admitted yet"
    )
    await fleet.admit()
    assert len(FakeRouter.made[1].urls) == 3


async def test_router_that_dies_repeatedly_ends_the_incarnation(
    fleet: Fleet, deaths: Deaths
) -> None:
    for times in range(4):
        fleet.check()
        await eventually(lambda times=times: len(FakeRouter.made) == times + 1)
        deaths.future(FakeRouter.made[times]).set_result("it hangs")
    await eventually(fleet._watches.tasks["router"].done)
    with pytest.raises(ServerError, match=r"router died 4 times in a minute: it hangs"):
        fleet.check()


async def test_engine_that_the_router_does_not_reach_is_evicted(fleet: Fleet) -> None:
    FakeRouter.made[0].unreachable = {fleet.engines["engine-1"].server.url}
    await fleet.admit()
    assert set(fleet.engines) == {"engine-0", "engine-2"}
    assert "does not reach it" in fleet.evicted["engine-1"]


async def test_a_router_that_reaches_no_engine_is_an_error(fleet: Fleet) -> None:
    FakeRouter.made[0].unreachable = {
        engine.server.url for engine in fleet.engines.values()
    }
    with pytest.raises(ServerError, match="no route"):
        await fleet.admit()


async def test_engine_start_is_retried_if_its_port_was_taken(
    fleet: Fleet, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updater.update(WeightVersion(1))
    init = FakeServer.__init__

    def first_loses_its_port(self: FakeServer, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        if len(FakeServer.made) == 4:
            self.start_error = ServerError("address already in use")
            self.port_lost = True

    monkeypatch.setattr(FakeServer, "__init__", first_loses_its_port)
    fleet.evict("engine-1", "it died")
    await eventually(lambda: "engine-1" in fleet.engines)
    assert fleet.engines["engine-1"].server is FakeServer.made[4]
    assert FakeServer.made[3].stopped


async def test_failed_start_of_one_engine_stops_all_engines(
    fleet: Fleet, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeServer, "may_be_ready", threading.Event())
    second = Fleet(EngineConfig(num_engines=20), tiny_model, tmp_path)
    starting = asyncio.create_task(second.start())
    await eventually(lambda: len(FakeServer.made) == 23)

    # its process has died: the wait for it fails, the others' go on
    FakeServer.made[10].stopped = True
    with pytest.raises(ServerError, match="engine-7 ended"):
        await starting
    assert all(server.stopped for server in FakeServer.made[3:])
    assert second.engines == {}


async def test_fleet_can_be_stopped_while_it_starts(
    fleet: Fleet,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog,
) -> None:
    """As an interrupt does it: the start is cancelled, and the fleet is stopped beside
    it."""
    monkeypatch.setattr(FakeServer, "may_be_ready", threading.Event())
    second = Fleet(EngineConfig(num_engines=3), tiny_model, tmp_path)
    starting = asyncio.create_task(second.start())
    await eventually(lambda: len(FakeServer.made) == 6)
    starting.cancel()
    await second.stop()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(server.stopped for server in FakeServer.made[3:])
    assert caplog.records == []


async def test_fleet_can_be_stopped_before_its_start_is_awaited(
    fleet: Fleet,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog,
) -> None:
    """As a run does it whose Ray did not start: the engines' processes exist, and
    nobody has waited yet."""
    monkeypatch.setattr(FakeServer, "may_be_ready", threading.Event())
    second = Fleet(EngineConfig(num_engines=3), tiny_model, tmp_path)
    starting = asyncio.create_task(second.start())
    await asyncio.sleep(0)
    assert len(FakeServer.made) == 6
    starting.cancel()
    await second.stop()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(server.stopped for server in FakeServer.made[3:])
    assert caplog.records == []


class FakeExternal(FakeServer):
    """An engine that others start: `stop` leaves it, and a new object waits for it."""

    made: ClassVar[list[FakeServer]] = []

    def __init__(self, name: str, url: str, *, key: str, **_: object):
        super().__init__(name, EngineConfig(), model_path=Path(), run_folder=Path())
        self.url = url
        self.api_key = ""
        self.admin_key = key

    def wait_ready(self) -> None:
        super().wait_ready()
        self.api_key = f"key of start {len(FakeExternal.made)}"


@pytest.fixture
async def mixed(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path
) -> AsyncIterator[Fleet]:
    """One engine of its own and two external ones. `fleet` brings the fakes."""
    monkeypatch.setattr(FakeExternal, "made", [])
    monkeypatch.setattr(engine_launcher, "ExternalEngine", FakeExternal)
    config = EngineConfig(
        external_engines=("http://a:1", "http://b:2/"),
        max_restarts=0,
        health_interval_s=0.01,
    )
    mixed = Fleet(config, tiny_model, tmp_path, external_key="theirs")
    await mixed.start()
    try:
        yield mixed
    finally:
        FakeServer.may_be_ready.set()
        await mixed.stop()


def updater_of(fleet: Fleet) -> WeightUpdater:
    bound = CanaryBound(max_gap=0.1, mean_gap=0.1)
    sender = FakeReceiver.trainer
    return WeightUpdater(
        WeightTransaction(
            sender, fleet.receivers, canary_prompts=[[1, 2, 3]], bound=bound
        ),
        fleet,
    )


async def test_external_engines_belong_to_the_fleet(mixed: Fleet) -> None:
    await updater_of(mixed).update(WeightVersion(1))
    await mixed.admit()
    assert set(mixed.engines) == {"engine-0", "external-0", "external-1"}
    assert {receiver(mixed, name).weights for name in mixed.engines} == {"1"}
    urls = FakeRouter.made[-1].urls
    assert {"http://a:1", "http://b:2"} < urls
    assert len(urls) == 3
    external = mixed.engines["external-1"]
    assert external.server.admin_key == "theirs"
    assert external.client.api_key == external.server.api_key != ""
    assert external.receiver.replies_over_http
    assert not mixed.engines["engine-0"].receiver.replies_over_http


async def test_evicted_external_engine_gets_the_fleets_version_before_it_returns(
    mixed: Fleet, deaths: Deaths
) -> None:
    """However often: `engine.max_restarts` counts those that we start."""
    updater = updater_of(mixed)
    await updater.update(WeightVersion(1))
    await mixed.admit()
    for version in (2, 3):
        left = mixed.engines["external-0"]
        FakeServer.may_be_ready.clear()
        deaths.future(left.server).set_result("it is silent")
        await eventually(lambda: not FakeRouter.made[-1].registered("http://a:1"))
        await updater.update(WeightVersion(version))
        assert set(mixed.engines) == {"engine-0", "external-1"}
        mixed.check()
        FakeServer.may_be_ready.set()
        await eventually(lambda: FakeRouter.made[-1].registered("http://a:1"))
        joining_engine = mixed.engines["external-0"]
        assert joining_engine is not left
        assert left.server.stopped  # type: ignore[attr-defined]
        assert receiver(mixed, "external-0").weights == str(version)
        assert receiver(mixed, "external-0").version == version
        assert joining_engine.client.api_key != left.client.api_key
    assert mixed.evicted == {}


async def test_restarted_external_engine_is_identified_again(
    mixed: Fleet, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updater_of(mixed).update(WeightVersion(1))
    await mixed.admit()
    errors = [
        ConfigError(
            "engine.external_engines", "http://a:1", "another model", "start it again"
        ),
        None,
    ]
    init = FakeExternal.__init__

    def fails_first(self: FakeExternal, name: str, url: str, **fields: str) -> None:
        init(self, name, url, **fields)
        self.start_error = errors.pop(0)

    monkeypatch.setattr(FakeExternal, "__init__", fails_first)
    deaths.future(mixed.engines["external-0"].server).set_result("it is silent")
    await eventually(lambda: "external-0" in mixed.engines and not errors)
    assert receiver(mixed, "external-0").weights == "1"


async def test_restart_limit_of_our_own_engines_holds_with_external_engines(
    mixed: Fleet, deaths: Deaths
) -> None:
    await updater_of(mixed).update(WeightVersion(1))
    deaths.future(mixed.engines["engine-0"].server).set_result("it is dead")
    await eventually(
        lambda: "engine-0" in mixed.evicted and mixed._replacements["engine-0"].done()
    )
    assert set(mixed.engines) == {"external-0", "external-1"}
    mixed.check()


async def test_unsuitable_external_engine_ends_the_start(
    mixed: Fleet, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = FakeExternal.__init__

    def fails(self: FakeExternal, name: str, url: str, **fields: str) -> None:
        init(self, name, url, **fields)
        self.start_error = ConfigError(
            "engine.external_engines", url, "another model", "start it again"
        )

    monkeypatch.setattr(FakeExternal, "__init__", fails)
    config = EngineConfig(num_engines=1, external_engines=("http://c:3",))
    other = Fleet(config, tiny_model, tmp_path, external_key="theirs")
    with pytest.raises(ConfigError, match="another model"):
        await other.start()
    assert FakeServer.made[-1].stopped
    assert other.engines == {}


async def test_an_engine_that_answers_wrongly_when_examined_leaves_and_comes_back(
    fleet: Fleet, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    liar = fleet.engines["engine-1"]
    newest_versions: list[int] = []

    async def verdict(
        client: object, *, newest_version: WeightVersion, **_: object
    ) -> str:
        newest_versions.append(newest_version)
        return "a log-prob of 5.0" if client is liar.client else ""

    monkeypatch.setattr(fleet_module, "wrong_reply", verdict)
    fleet.examine(WeightVersion(1))
    fleet.examine(WeightVersion(1))  # one examination at a time
    await eventually(lambda: fleet.engines.get("engine-1") not in (None, liar))
    assert newest_versions == [1, 1, 1]
    assert liar.server.stopped
    assert {"engine-0", "engine-1", "engine-2"} == set(fleet.engines)


async def test_each_version_is_announced_before_an_engine_gets_it(fleet: Fleet) -> None:
    announced: list[tuple[int, list[int]]] = []
    transaction = WeightTransaction(
        FakeReceiver.trainer,
        fleet.receivers,
        canary_prompts=[],
        bound=CanaryBound(max_gap=0.1, mean_gap=0.1),
    )
    updater = WeightUpdater(
        transaction,
        fleet,
        lambda version: announced.append(
            (version, [receiver.version for receiver in FakeReceiver.made])
        ),
    )
    for version in (4, 5):
        await updater.update(WeightVersion(version))
    assert announced == [
        (4, [0, 0, 0]),
        (5, [4, 4, 4]),
    ]


async def test_an_engine_that_comes_back_while_the_router_is_away_waits_for_it(
    fleet: Fleet, updater: WeightUpdater, deaths: Deaths
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    first = FakeRouter.made[0]
    first.is_away = True  # and nobody has noticed yet
    fleet.evict("engine-1", "it died")
    await eventually(lambda: "engine-1" in fleet.engines)
    back = fleet.engines["engine-1"]
    await asyncio.sleep(0.2)
    assert fleet.engines.get("engine-1") is back, "it waits"
    deaths.future(first).set_result("its process has ended")
    await eventually(
        lambda: (
            FakeRouter.made[-1].urls == {e.server.url for e in fleet.engines.values()}
        )
    )
    assert fleet.engines["engine-1"] is back
    assert len(FakeServer.made) == 4
    fleet.check()


async def test_engines_outlive_a_router_that_dies_again_while_it_learns_of_them(
    fleet: Fleet, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.admit()
    wait_ready = FakeRouter.wait_ready

    def second_dies(self: FakeRouter) -> None:
        wait_ready(self)
        self.is_away = len(FakeRouter.made) == 2

    monkeypatch.setattr(FakeRouter, "wait_ready", second_dies)
    deaths.future(FakeRouter.made[0]).set_result("killed")
    await eventually(lambda: len(FakeRouter.made) == 2)
    deaths.future(FakeRouter.made[1]).set_result("killed again")
    await eventually(lambda: len(FakeRouter.made[-1].urls) == 3)
    assert set(fleet.engines) == {"engine-0", "engine-1", "engine-2"}
    assert fleet.evicted == {}


async def test_restarts_of_an_engine_are_counted_by_the_hour(
    fleet: Fleet, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 2; a run of weeks forgets those of yesterday."""
    now = [0.0]
    monkeypatch.setattr(
        engine_restarts, "RestartLimit", partial(RestartLimit, clock=lambda: now[0])
    )
    await updater.update(WeightVersion(1))
    for hour in range(3):
        now[0] = 4000.0 * hour
        for _ in range(2):
            fleet.evict("engine-1", "it died")
            await eventually(lambda: "engine-1" in fleet.engines)
    assert fleet._restarts.counts == {"engine-1": 6}
    fleet.evict("engine-1", "it died")
    await eventually(fleet._replacements["engine-1"].done)
    assert "engine-1" not in fleet.engines


async def test_each_incident_of_the_fleet_is_a_line_on_the_console(
    fleet: Fleet, updater: WeightUpdater, deaths: Deaths
) -> None:
    await updater.update(WeightVersion(1))
    await fleet.admit()
    lines: list[str] = []
    with incidents_shown(lines.append):
        for _ in range(3):
            fleet.evict("engine-1", "a process of it has ended\nlast lines of its log")
            await eventually(fleet._replacements["engine-1"].done)
        deaths.future(FakeRouter.made[0]).set_result("its process has ended")
        await eventually(
            lambda: len(FakeRouter.made) == 2 and len(FakeRouter.made[1].urls) == 2
        )
        await eventually(lambda: "back" in lines[-1])
    left = "warning: engine-1 leaves the fleet: a process of it has ended (the log has more)"
    assert lines == [
        *(left, "warning: engine-1 is back") * 2,
        left,
        "warning: engine-1 stays away: it left more than 2 times in an hour",
        "warning: the router is started again: its process has ended",
        "warning: the router is back",
    ]
    fleet.evict("engine-0", "later")
    assert len(lines) == 8, "nobody is shown anything after the block"
