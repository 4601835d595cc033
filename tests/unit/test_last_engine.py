"""The last engine of a fleet leaves: requests and updates wait for it, and the run ends
only if it stays away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
from dying_fleet import (
    Deaths,
    FakeClient,
    FakeReceiver,
    FakeServer,
    eventually,
    receiver,
)

from invrl.engines.fleet.fleet import Fleet
from invrl.errors import DeadlineError, LayoutError, ServerError, WeightSyncError
from invrl.host.output.incidents import incidents_shown
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.run.loop.gpu_turns import GpuTurns, SenderThatSleeps
from invrl.run.loop.weight_updater import WeightUpdater
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

NAMES = {"engine-0", "engine-1", "engine-2"}


class SleepingTrainer:
    """Counts what it stages, and notes whether it has its memory."""

    def __init__(self) -> None:
        self.is_awake = False
        self.staged: list[int] = []
        self.logprobs = FakeReceiver.trainer.logprobs

    async def wake(self) -> int:
        self.is_awake = True
        return 0

    async def sleep(self) -> int:
        self.is_awake = False
        return 0

    async def layout(self) -> WeightLayout:
        return await FakeReceiver.trainer.layout()

    async def stage(self, version: WeightVersion) -> StagedWeights:
        assert self.is_awake
        self.staged.append(version)
        return await FakeReceiver.trainer.stage(version)


@dataclass
class SharedGpus:
    fleet: Fleet
    trainer: SleepingTrainer
    turns: GpuTurns


@pytest.fixture
async def shared(fleet: Fleet) -> SharedGpus:
    """Every engine holds version 1 and serves; it is the engines' turn."""
    fleet._start_turns.shares_gpus = True
    trainer = SleepingTrainer()
    transaction = WeightTransaction(
        SenderThatSleeps(trainer),
        fleet.receivers,
        canary_prompts=[[1, 2, 3]],
        bound=CanaryBound(max_gap=0.1, mean_gap=0.1),
        until_engine=fleet.until_engine,
    )
    updater = WeightUpdater(transaction, fleet)
    turns = GpuTurns(trainer, fleet, suspend=updater.suspend, update=updater.update)
    await turns.give_to_trainer()
    await turns.update(WeightVersion(1))
    await fleet.admit()
    return SharedGpus(fleet, trainer, turns)


@pytest.fixture
async def updater(fleet: Fleet) -> WeightUpdater:
    """Every engine holds version 1 and serves."""
    transaction = WeightTransaction(
        FakeReceiver.trainer,
        fleet.receivers,
        canary_prompts=[[1, 2, 3]],
        bound=CanaryBound(max_gap=0.1, mean_gap=0.1),
        until_engine=fleet.until_engine,
    )
    updater = WeightUpdater(transaction, fleet)
    await updater.update(WeightVersion(1))
    await fleet.admit()
    return updater


@pytest.fixture
async def lines() -> AsyncIterator[list[str]]:
    shown: list[str] = []
    with incidents_shown(shown.append):
        yield shown


def kill_all(fleet: Fleet, deaths: Deaths) -> None:
    for engine in fleet.engines.values():
        deaths.future(engine.server).set_result("a process of it has ended")


async def test_a_fleet_without_engines_waits_for_those_that_start_again(
    fleet: Fleet,
    updater: WeightUpdater,
    deaths: Deaths,
    lines: list[str],
) -> None:
    FakeServer.may_be_ready.clear()
    kill_all(fleet, deaths)
    await eventually(lambda: len(FakeServer.made) == 6)
    assert not fleet.engines
    fleet.check()
    assert sum("no engine is left: requests and weight updates" in x for x in lines) > 0
    FakeServer.may_be_ready.set()
    await eventually(lambda: fleet.engines.keys() == NAMES)
    assert {receiver(fleet, name).weights for name in NAMES} == {"1"}
    await eventually(lambda: sum("is back" in line for line in lines) == 3)
    fleet.check()


async def test_an_update_waits_until_an_engine_is_back_and_reaches_it(
    fleet: Fleet,
    updater: WeightUpdater,
    deaths: Deaths,
) -> None:
    FakeServer.may_be_ready.clear()
    kill_all(fleet, deaths)
    await eventually(lambda: not fleet.engines)
    updating = asyncio.create_task(updater.update(WeightVersion(2)))
    done, _ = await asyncio.wait([updating], timeout=0.3)
    assert not done
    FakeServer.may_be_ready.set()
    update = await updating
    assert update.version == 2
    await eventually(lambda: fleet.engines.keys() == NAMES)
    assert {receiver(fleet, name).weights for name in NAMES} == {"2"}
    assert {receiver(fleet, name).version for name in NAMES} == {2}
    assert FakeReceiver.trainer.staged == [1, 2], "staged once, however long it waited"


@pytest.mark.parametrize("phase", ["check", "pause", "load", "commit", "logprobs"])
async def test_an_update_that_loses_every_engine_goes_on_with_those_that_come_back(
    fleet: Fleet,
    updater: WeightUpdater,
    phase: str,
) -> None:
    """The engines die within the update, before their watches notice it."""
    for name, engine in fleet.engines.items():
        fake = receiver(fleet, name)
        fake.fails = phase
        if phase == "logprobs":
            fake.logprobs = refuse  # type: ignore[method-assign]
        client = engine.client
        assert isinstance(client, FakeClient)
        client.is_silent = True
    update = await updater.update(WeightVersion(2))
    assert update.version == 2
    await eventually(lambda: fleet.engines.keys() == NAMES)
    assert {receiver(fleet, name).weights for name in NAMES} == {"2"}
    fleet.check()


async def refuse(prompts: object) -> None:
    raise WeightSyncError("no answer")


async def all_are_back(shared: SharedGpus, weights: str) -> None:
    await eventually(lambda: shared.fleet.engines.keys() == NAMES)
    for name in NAMES:
        fake = receiver(shared.fleet, name)
        assert (fake.weights, fake.version) == (weights, int(weights))
        assert not fake.is_paused
    shared.fleet.check()


async def test_engines_that_die_in_the_trainers_turn_start_once_it_sleeps(
    shared: SharedGpus, deaths: Deaths, lines: list[str]
) -> None:
    """They are back with the new weights, and the next turn is as any other."""
    await shared.turns.give_to_trainer()
    kill_all(shared.fleet, deaths)
    await eventually(lambda: not shared.fleet.engines)
    await shared.fleet.until_lost_have_ended()
    await asyncio.sleep(0.1)
    assert len(FakeServer.made) == 3, "an engine started in the trainer's turn"
    shared.fleet.check()
    FakeServer.may_be_ready.clear()
    updating = asyncio.create_task(shared.turns.update(WeightVersion(2)))
    await eventually(lambda: len(FakeServer.made) == 4)
    assert not shared.trainer.is_awake
    assert not updating.done()
    FakeServer.may_be_ready.set()
    assert (await updating).version == 2
    await all_are_back(shared, "2")
    assert sum("no engine is left: requests and weight" in line for line in lines) == 1
    await shared.turns.give_to_trainer()
    assert shared.trainer.is_awake
    await shared.turns.update(WeightVersion(3))
    await all_are_back(shared, "3")


def die_unnoticed(fleet: Fleet, phase: str) -> None:
    for name, engine in fleet.engines.items():
        receiver(fleet, name).fails = phase
        if phase == "logprobs":
            receiver(fleet, name).logprobs = refuse  # type: ignore[method-assign]
        assert isinstance(engine.client, FakeClient)
        engine.client.is_silent = True


@pytest.mark.parametrize("phase", ["check", "load", "commit", "logprobs"])
async def test_engines_that_die_as_the_trainers_turn_ends_get_what_it_has_staged(
    shared: SharedGpus, phase: str
) -> None:
    await shared.turns.give_to_trainer()
    die_unnoticed(shared.fleet, phase)
    update = await shared.turns.update(WeightVersion(2))
    assert update.version == 2
    await all_are_back(shared, "2")
    assert shared.trainer.staged == [1, 2]


async def test_engines_that_die_as_the_trainers_turn_begins_do_not_hold_it_up(
    shared: SharedGpus,
) -> None:
    die_unnoticed(shared.fleet, "pause")
    await shared.turns.give_to_trainer()
    assert shared.trainer.is_awake
    assert len(FakeServer.made) == 3
    await shared.turns.update(WeightVersion(2))
    await all_are_back(shared, "2")


async def test_no_engine_starts_while_a_trainer_that_staged_nothing_is_awake(
    shared: SharedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared.turns.give_to_trainer()
    die_unnoticed(shared.fleet, "check")

    async def stage(version: WeightVersion) -> StagedWeights:
        raise WeightSyncError("it cannot be staged")

    monkeypatch.setattr(shared.trainer, "stage", stage)
    with pytest.raises(WeightSyncError, match="cannot be staged"):
        await shared.turns.update(WeightVersion(2))


async def test_a_turn_ends_with_an_error_if_no_engine_comes_back(
    shared: SharedGpus, deaths: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared.turns.give_to_trainer()
    monkeypatch.setattr(FakeServer, "wait_ready", broken_start)
    kill_all(shared.fleet, deaths)
    await eventually(lambda: not shared.fleet.engines)
    with pytest.raises(ServerError, match=r"no engine is left: .*did not come back"):
        await asyncio.wait_for(shared.turns.update(WeightVersion(2)), 60)


async def test_a_layout_that_does_not_fit_waits_for_nobody(
    fleet: Fleet,
    updater: WeightUpdater,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def check(self: FakeReceiver, *_: object) -> None:
        raise LayoutError("w has another shape")

    monkeypatch.setattr(FakeReceiver, "check", check)
    with pytest.raises(LayoutError):
        await updater.update(WeightVersion(2))
    assert fleet.engines.keys() == NAMES


async def test_an_update_that_living_engines_refuse_waits_for_nobody(
    fleet: Fleet,
    updater: WeightUpdater,
) -> None:
    for name in fleet.engines:
        receiver(fleet, name).fails = "check"
    with pytest.raises(WeightSyncError, match="refuses"):
        await updater.update(WeightVersion(2))
    assert fleet.engines.keys() == NAMES


async def test_the_run_ends_once_the_restarts_are_spent(
    fleet: Fleet,
    updater: WeightUpdater,
    deaths: Deaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeServer, "wait_ready", broken_start)
    kill_all(fleet, deaths)
    await eventually(lambda: not fleet.engines)
    with pytest.raises(ServerError, match=r"no engine is left: .*did not come back"):
        await asyncio.wait_for(fleet.until_engine(), 60)
    assert len(FakeServer.made) == 3 + 3 * 2, "two restarts of each in an hour"
    with pytest.raises(ServerError, match="no engine is left"):
        await updater.update(WeightVersion(2))


def broken_start(server: FakeServer) -> None:
    raise ServerError(f"{server.name} ended at once")


async def test_the_run_ends_when_the_last_engine_misses_the_deadline_of_its_start(
    fleet: Fleet,
    updater: WeightUpdater,
    deaths: Deaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though it is started once more, which nobody waits for."""
    FakeServer.may_be_ready.clear()
    monkeypatch.setattr(FakeServer, "wait_ready", late_at_first)
    kill_all(fleet, deaths)
    await eventually(lambda: not fleet.engines)
    with pytest.raises(ServerError, match=r"no engine is left: .*to be healthy"):
        await asyncio.wait_for(fleet.until_engine(), 20)


def late_at_first(
    server: FakeServer, wait_ready: Callable[[FakeServer], None] = FakeServer.wait_ready
) -> None:
    starts = sum(made.name == server.name for made in FakeServer.made)
    if starts == 2:  # the first was that of the fleet
        raise DeadlineError(f"{server.name} to be healthy", 300.0)
    wait_ready(server)


async def test_where_nobody_sends_weights_an_engine_returns_with_its_model_folder(
    fleet: Fleet,
    deaths: Deaths,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`invrl serve` and `invrl eval`."""
    await fleet.admit()
    fleet.restart_evicted()
    FakeServer.may_be_ready.clear()
    kill_all(fleet, deaths)
    await eventually(lambda: not fleet.engines)
    fleet.check()
    FakeServer.may_be_ready.set()
    await eventually(lambda: fleet.engines.keys() == NAMES)
    for engine in fleet.engines.values():
        await eventually(lambda url=engine.server.url: fleet.router.registered(url))

    async def trained(self: FakeClient) -> str:
        return "7"

    monkeypatch.setattr(FakeClient, "weight_version", trained)
    deaths.future(fleet.engines["engine-0"].server).set_result("it is dead")
    await eventually(
        lambda: "engine-0" in fleet.evicted and fleet._replacements["engine-0"].done()
    )
    assert "an earlier training run" in fleet.evicted["engine-0"]


async def test_before_the_first_version_the_death_of_all_engines_ends_the_start(
    fleet: Fleet,
    deaths: Deaths,
) -> None:
    kill_all(fleet, deaths)
    await eventually(lambda: not fleet.engines)
    with pytest.raises(ServerError, match="no engine is left"):
        fleet.check()
    with pytest.raises(ServerError, match="no engine is left"):
        await fleet.hold_starts()
