"""The weight transaction over fakes: whatever fails, all engines that stay are whole,
and none is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from invrl.errors import CanaryError, ChecksumError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.update import fleet_update
from invrl.weights.update import transaction as weight_sync
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.transaction import WeightTransaction

SPEC = TensorSpec(name="w", shape=(1,), dtype="float32")
PHASES = ("check", "pause", "load", "checksums", "commit", "resume", "logprobs")


class Sender:
    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []
        """The canary prompts of each call."""

    async def layout(self) -> WeightLayout:
        return (SPEC,)

    async def stage(self, version: WeightVersion) -> StagedWeights:
        return StagedWeights(
            version=version,
            handle=str(version),
            checksums={"w": f"bytes-of-{version}"},
            num_bytes=4,
        )

    async def logprobs(self, prompts: Sequence[Sequence[int]]):
        self.asked.append([list(ids) for ids in prompts])
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]


class Receiver:
    """An engine in memory; `fail[phase]` is called before the phase's work (or `after`)
    is done."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.weights = "0"
        self.version = 0
        self.paused = False
        self.asleep = False
        self.calls: list[str] = []
        self.gap_of_prompt: dict[int, float] = {}
        """By a prompt's first token; `gap` for the others."""
        self.fail: dict[str, Callable[[], None]] = {}
        self.hang: dict[str, Callable[[], None]] = {}
        """Phases that do not end; what is called then lets their deadline pass."""
        self.gap = 0.0
        self.asked: list[list[list[int]]] = []
        """The canary prompts of each call."""
        self.traffic_on_mixed = False

    @property
    def name(self) -> str:
        return self._name

    async def _phase(self, phase: str) -> None:
        self.calls.append(phase)
        if phase in self.hang:
            self.hang.pop(phase)()
            await asyncio.Event().wait()
        if phase in self.fail:
            self.fail.pop(phase)()

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None:
        await self._phase("check")

    async def pause(self) -> None:
        self.paused = True
        await self._phase("pause")

    async def sleep(self) -> None:
        assert self.paused, "memory taken from running requests"
        await self._phase("sleep")
        self.asleep = True

    async def wake(self) -> None:
        await self._phase("wake")
        self.asleep = False

    async def load(self, staged: StagedWeights) -> None:
        assert self.paused, "weights moved under running requests"
        self.weights = "torn"
        await self._phase("load")
        self.weights = staged.handle

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        await self._phase("checksums")
        return {"w": f"bytes-of-{self.weights}"}

    async def commit(self, version: WeightVersion) -> None:
        assert self.paused, "named while running"
        self.version = version
        await self._phase("commit")

    async def resume(self) -> None:
        await self._phase("resume")
        assert not self.asleep, "resumed without a cache"
        self.paused = False
        self.traffic_on_mixed |= self.weights != str(self.version)

    async def logprobs(self, prompts: Sequence[Sequence[int]]):
        self.asked.append([list(ids) for ids in prompts])
        await self._phase("logprobs")
        gaps = [self.gap_of_prompt.get(ids[0], self.gap) for ids in prompts]
        return [
            np.full(len(ids) - 1, gap, np.float32)
            for ids, gap in zip(prompts, gaps, strict=True)
        ]


def transaction(
    receivers: Sequence[Receiver], *, is_rolling: bool = False
) -> WeightTransaction:
    async def fleet() -> Sequence[Receiver]:
        return receivers

    return WeightTransaction(
        Sender(),
        fleet,
        canary_prompts=[[1, 2, 3]],
        bound=CanaryBound(max_gap=0.1, mean_gap=0.05),
        deadline_s=600.0,
        is_rolling=is_rolling,
    )


def boom() -> None:
    raise WeightSyncError("boom")


def assert_serves(engine: Receiver, version: int) -> None:
    """It has this version's weights, under its number, and takes traffic."""
    assert engine.weights == str(version)
    assert engine.version == version
    assert engine.paused is False


@pytest.fixture
def three() -> list[Receiver]:
    return [Receiver(f"engine-{at}") for at in range(3)]


async def test_update_phases_reach_all_engines_in_order(three: list[Receiver]) -> None:
    update = await transaction(three).run(WeightVersion(1))
    for engine in three:
        assert_serves(engine, 1)
        assert engine.calls == list(PHASES)
    assert set(update.seconds) == {
        "joining_engines",
        "stage",
        "prepare",
        "pause",
        "load",
        "commit",
        "resume",
        "canary",
        "trainer_canary",
        "paused",
    }
    assert update.lost_engines == {}


class Beside(Receiver):
    """Loads a version beside the one that it serves."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.loaded = ""

    async def load(self, staged: StagedWeights) -> None:
        await self._phase("load")
        self.loaded = staged.handle

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        await self._phase("checksums")
        return {"w": f"bytes-of-{self.loaded}"}

    async def commit(self, version: WeightVersion) -> None:
        await self._phase("commit")
        self.weights = self.loaded
        self.version = version


async def test_engines_that_load_beside_what_they_serve_are_not_paused() -> None:
    engines = [Beside("engine-0"), Beside("engine-1")]
    updates = transaction(engines)
    updates.pauses = False
    update = await updates.run(WeightVersion(1))
    for engine in engines:
        assert_serves(engine, 1)
        assert engine.calls == ["check", "load", "checksums", "commit", "logprobs"]
    assert update.seconds["paused"] == 0
    for phase in ("load", "commit"):
        for engine in engines:
            engine.calls.clear()
            engine.fail[phase] = boom
        with pytest.raises(WeightSyncError, match=f"failed in phase {phase}"):
            await updates.run(WeightVersion(2))
        for engine in engines:
            assert_serves(engine, 1)
            assert not {"pause", "resume"} & set(engine.calls)


def fail_in(
    engines: Sequence[Receiver], phase: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in one of three ways."""
    deadlines: dict[object, asyncio.Timeout] = {}

    def timeout(seconds: float) -> asyncio.Timeout:
        deadline = asyncio.timeout(seconds)
        deadlines[asyncio.current_task()] = deadline
        return deadline

    for module in (weight_sync, fleet_update):
        monkeypatch.setattr(
            module, "asyncio", SimpleNamespace(**{**vars(asyncio), "timeout": timeout})
        )
    for engine in engines:
        if how == "hang":
            engine.hang = {
                phase: lambda: deadlines[asyncio.current_task()].reschedule(0.0)
            }
        else:
            engine.fail = {phase: boom if how == "error" else (lambda: 1 // 0)}


WAYS = pytest.mark.parametrize("how", ["error", "hang", "exception"])
BEFORE_THE_COMMIT = pytest.mark.parametrize(
    "phase", ["check", "pause", "load", "checksums", "commit"]
)


@WAYS
@BEFORE_THE_COMMIT
@pytest.mark.parametrize("first", [False, True])
async def test_engine_that_fails_alone_is_dropped_and_the_update_continues(
    three: list[Receiver],
    phase: str,
    how: str,
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each phase, failing on the middle engine, in the first update of a run and in a
    later one."""
    updates = transaction(three)
    if not first:
        await updates.run(WeightVersion(1))
    fail_in([three[1]], phase, how, monkeypatch)
    update = await updates.run(WeightVersion(2))
    assert list(update.lost_engines) == ["engine-1"]
    assert update.lost_engines["engine-1"]
    for engine in (three[0], three[2]):
        assert_serves(engine, 2)
    assert not any(engine.traffic_on_mixed for engine in three)
    # It is not called again: neither restored nor resumed nor asked for a canary.
    assert three[1].calls[-1] == phase


@WAYS
@BEFORE_THE_COMMIT
async def test_a_phase_in_which_every_engine_fails_leaves_all_on_the_old_version(
    three: list[Receiver], phase: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    fail_in(three, phase, how, monkeypatch)
    with pytest.raises(
        WeightSyncError, match=r"engine-0 .* \(and so did engine-1, engine-2\)"
    ) as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.engine == "engine-0"
    assert raised.value.unrestored == ()
    for engine in three:
        assert_serves(engine, 1)
        assert not engine.traffic_on_mixed
    update = await updates.run(WeightVersion(2))  # and the next one works
    assert update.version == 2
    assert {engine.weights for engine in three} == {"2"}


async def test_failure_of_the_last_engine_ends_the_update(
    three: list[Receiver],
) -> None:
    """One after another, in different phases: no engine is left to go on with."""
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    three[0].fail = {"check": boom}
    three[1].fail = {"pause": boom}
    three[2].fail = {"load": boom}
    with pytest.raises(
        WeightSyncError, match=r"engine-2 .*lost before: engine-0, engine-1"
    ) as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.unrestored == ("engine-0", "engine-1")
    assert_serves(three[2], 1)


def wrong_layout() -> None:
    raise LayoutError("no such weight")


async def test_nothing_is_paused_or_moved_when_the_layout_is_wrong_everywhere(
    three: list[Receiver],
) -> None:
    for engine in three:
        engine.fail = {"check": wrong_layout}
    with pytest.raises(LayoutError, match="no such weight") as raised:
        await transaction(three).run(WeightVersion(1))
    assert raised.value.unrestored == ()
    assert [engine.calls for engine in three] == [["check"]] * 3


async def test_an_engine_that_cannot_be_restored_is_named_and_stays_paused(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))

    def break_down() -> None:
        three[1].fail = {"load": boom}
        boom()

    for engine in three:
        engine.fail = {"load": boom}
    three[1].fail = {"load": break_down}
    with pytest.raises(WeightSyncError) as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.unrestored == ("engine-1",)
    assert three[1].paused
    for engine in (three[0], three[2]):
        assert_serves(engine, 1)


async def test_failed_restore_is_found_by_the_checksum(three: list[Receiver]) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    stuck_engine = three[0]

    async def stuck(staged: StagedWeights) -> None:
        stuck_engine.weights = "2"

    stuck_engine.load = stuck  # type: ignore[method-assign]
    for engine in three:
        engine.fail = {"commit": boom}
    with pytest.raises(WeightSyncError) as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.unrestored == ("engine-0",)
    assert stuck_engine.paused


async def test_without_earlier_weights_written_engines_are_unrestored(
    three: list[Receiver],
) -> None:
    for engine in three:
        engine.fail = {"load": boom}
    with pytest.raises(WeightSyncError) as raised:
        await transaction(three).run(WeightVersion(1))
    assert raised.value.unrestored == ("engine-0", "engine-1", "engine-2")
    assert not any(engine.traffic_on_mixed for engine in three)


async def skip_load(staged: StagedWeights) -> None:
    """What an engine that only says it loaded does."""


async def test_a_load_that_one_engine_skipped_costs_that_engine(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    three[2].load = skip_load  # type: ignore[method-assign]
    update = await updates.run(WeightVersion(2))
    assert "not what was sent" in update.lost_engines["engine-2"]
    assert [engine.weights for engine in three] == ["2", "2", "1"]
    assert three[2].paused


async def test_a_load_that_every_engine_skipped_is_a_checksum_error(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    for engine in three:
        engine.load = skip_load  # type: ignore[method-assign]
    with pytest.raises(ChecksumError, match="engine-0"):
        await updates.run(WeightVersion(2))
    assert [engine.weights for engine in three] == ["1", "1", "1"]


class Joined:
    """The fleet's side of `bring_up`: makes the engine one of the fleet."""

    def __init__(self, fleet: list[Receiver], engine: Receiver) -> None:
        self.fleet = fleet
        self.engine = engine

    def __call__(self) -> None:
        self.fleet.append(self.engine)


class TestBringUp:
    """An engine that comes later gets what the fleet holds."""

    async def test_new_engine_holds_the_verified_version(
        self, three: list[Receiver]
    ) -> None:
        joining_engine = three.pop()
        updates = transaction(three)
        await updates.run(WeightVersion(1))
        await updates.run(WeightVersion(2))
        await updates.bring_up(joining_engine, Joined(three, joining_engine))
        assert_serves(joining_engine, 2)
        assert joining_engine.calls == list(PHASES)
        assert three[-1] is joining_engine

    async def test_new_engine_cannot_join_before_the_first_version(
        self, three: list[Receiver]
    ) -> None:
        joining_engine = three.pop()
        with pytest.raises(WeightSyncError, match="holds no version"):
            await transaction(three).bring_up(
                joining_engine, Joined(three, joining_engine)
            )

    @pytest.mark.parametrize("phase", PHASES)
    async def test_new_engine_that_fails_in_any_phase_does_not_join(
        self, three: list[Receiver], phase: str
    ) -> None:
        joining_engine = three.pop()
        updates = transaction(three)
        await updates.run(WeightVersion(1))
        joining_engine.fail = {phase: boom}
        with pytest.raises(WeightSyncError, match="boom"):
            await updates.bring_up(joining_engine, Joined(three, joining_engine))
        assert joining_engine not in three

    async def test_skipped_load_of_a_new_engine_is_found_by_the_checksum(
        self, three: list[Receiver]
    ) -> None:
        joining_engine = three.pop()
        updates = transaction(three)
        await updates.run(WeightVersion(1))
        joining_engine.load = skip_load  # type: ignore[method-assign]
        with pytest.raises(ChecksumError):
            await updates.bring_up(joining_engine, Joined(three, joining_engine))

    async def test_new_engine_over_the_canary_bound_does_not_join(
        self, three: list[Receiver]
    ) -> None:
        joining_engine = three.pop()
        updates = transaction(three)
        await updates.run(WeightVersion(1))
        joining_engine.gap = 0.11
        with pytest.raises(CanaryError, match="engine-2"):
            await updates.bring_up(joining_engine, Joined(three, joining_engine))
        assert joining_engine not in three


@pytest.mark.parametrize("phase", ["resume", "logprobs"])
async def test_engine_that_fails_after_the_commit_is_lost_and_the_update_continues(
    three: list[Receiver], phase: str
) -> None:
    three[0].fail = {phase: boom}
    update = await transaction(three).run(WeightVersion(1))
    assert update.lost_engines == {"engine-0": "boom"}
    for engine in three[1:]:
        assert_serves(engine, 1)


async def test_loss_of_all_engines_after_the_commit_is_an_error(
    three: list[Receiver],
) -> None:
    for engine in three:
        engine.fail = {"resume": boom}
    with pytest.raises(
        WeightSyncError, match="every engine was lost after the commit"
    ) as raised:
        await transaction(three).run(WeightVersion(1))
    assert raised.value.unrestored == ("engine-0", "engine-1", "engine-2")


async def test_first_update_asks_every_canary_prompt_and_later_updates_one_in_turn(
    three: list[Receiver],
) -> None:
    joining_engine = three.pop()
    updates = transaction(three)
    updates.canary_prompts = [[1, 2, 3], [4, 5], [6, 7]]
    for version in range(1, 6):
        await updates.run(WeightVersion(version))
    expected = [
        [[1, 2, 3], [4, 5], [6, 7]],
        [[6, 7]],
        [[1, 2, 3]],
        [[4, 5]],
        [[6, 7]],
    ]
    assert three[0].asked == three[1].asked == expected
    assert cast("Sender", updates.sender).asked == expected
    await updates.bring_up(joining_engine, Joined(three, joining_engine))
    assert joining_engine.asked == [[[6, 7]]], "what the trainer's answer is of"


@pytest.mark.parametrize("is_rolling", [False, True])
async def test_trainer_computes_its_canary_once_when_no_engine_is_paused(
    three: list[Receiver], is_rolling: bool
) -> None:
    updates = transaction(three, is_rolling=is_rolling)
    sender = cast("Sender", updates.sender)
    paused: list[list[str]] = []
    answer = sender.logprobs

    async def noted(prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        paused.append([engine.name for engine in three if engine.paused])
        return await answer(prompts)

    sender.logprobs = noted  # type: ignore[method-assign]
    for version in (1, 2):
        await updates.run(WeightVersion(version))
    assert paused == [[], []]


async def test_canary_prompt_over_the_bound_is_judged_with_all_prompts(
    three: list[Receiver],
) -> None:
    """0.06 is over the bound of the mean, and the mean of the three prompts is not."""
    joining_engine = three.pop()
    updates = transaction(three)
    updates.canary_prompts = [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    await updates.run(WeightVersion(1))
    three[1].gap_of_prompt = {7: 0.06}
    update = await updates.run(WeightVersion(2))
    assert (
        three[0].asked
        == three[1].asked
        == [updates.canary_prompts, [[7, 8, 9]], updates.canary_prompts]
    )
    assert update.canary_mean_gap == pytest.approx(0.02)
    assert update.canary_max_gap == pytest.approx(0.06)
    await updates.bring_up(joining_engine, Joined(three, joining_engine))
    assert joining_engine.asked == [updates.canary_prompts], (
        "what the trainer's answer is of"
    )


async def test_later_update_fails_if_all_canary_prompts_are_over_the_bound(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    updates.canary_prompts = [
        [1, 2, 3],
        [4, 5, 6],
        [7, 8, 9],
    ]
    await updates.run(WeightVersion(1))
    three[1].gap = 0.06
    with pytest.raises(CanaryError, match="engine-1"):
        await updates.run(WeightVersion(2))
    assert three[1].asked == [
        updates.canary_prompts,
        [[7, 8, 9]],
        updates.canary_prompts,
    ]


@pytest.mark.parametrize("gap", [0.11, 0.06, float("nan")])
async def test_canary_gap_over_the_bound_is_an_error(
    three: list[Receiver], gap: float
) -> None:
    three[1].gap = gap
    with pytest.raises(CanaryError, match="engine-1"):
        await transaction(three).run(WeightVersion(1))
    assert not any(engine.paused for engine in three)


async def test_canary_gap_within_the_bound_is_reported(three: list[Receiver]) -> None:
    three[1].gap = 0.04
    update = await transaction(three).run(WeightVersion(1))
    assert update.canary_max_gap == pytest.approx(0.04)
    assert update.canary_mean_gap == pytest.approx(0.04)


@pytest.mark.parametrize("phase", ["pause", "load", "checksums", "commit", "resume"])
async def test_update_cancelled_in_any_phase_leaves_no_engine_paused_or_mixed(
    three: list[Receiver], phase: str
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    release = asyncio.Event()
    first = three[1]._phase

    async def slow(at: str) -> None:
        if at == phase and not release.is_set():
            release.set()
            await asyncio.sleep(0.05)
        await first(at)

    three[1]._phase = slow  # type: ignore[method-assign]
    task = asyncio.create_task(updates.run(WeightVersion(2)))
    await release.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(60):
        while any(engine.paused for engine in three):
            await asyncio.sleep(0.001)
    assert len({(e.weights, e.version) for e in three}) == 1
    assert not any(e.traffic_on_mixed for e in three)


@pytest.mark.parametrize("is_rolling", [False, True])
async def test_update_of_an_empty_fleet_is_an_error(is_rolling: bool) -> None:
    with pytest.raises(WeightSyncError, match="no engine"):
        await transaction([], is_rolling=is_rolling).run(WeightVersion(1))


class TestRolling:
    """One engine after the other. The fleet ends on one version, or says who is not on
    it."""

    async def test_rolling_update_pauses_one_engine_at_a_time_until_its_canary(
        self, three: list[Receiver]
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        order: list[str] = []
        for engine in three:
            phase = engine._phase

            async def noted(at: str, engine: Receiver = engine, phase=phase) -> None:
                assert [
                    other.name
                    for other in three
                    if other.paused and other is not engine
                ] == []
                order.append(f"{engine.name} {at}")
                await phase(at)

            engine._phase = noted  # type: ignore[method-assign]
        update = await updates.run(WeightVersion(2))
        alone = ["pause", "load", "checksums", "commit", "resume", "logprobs"]
        assert order == [f"{engine.name} check" for engine in three] + [
            f"{engine.name} {phase}" for engine in three for phase in alone
        ]
        assert [(e.weights, e.version, e.paused) for e in three] == [
            ("2", 2, False)
        ] * 3
        assert update.lost_engines == {}
        assert not any(engine.traffic_on_mixed for engine in three)

    @WAYS
    @pytest.mark.parametrize("phase", ["check", "pause", "load", "checksums", "commit"])
    @pytest.mark.parametrize("index", [0, 2])
    async def test_rolling_update_continues_without_an_engine_that_fails_alone(
        self,
        three: list[Receiver],
        phase: str,
        how: str,
        index: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        fail_in([three[index]], phase, how, monkeypatch)
        update = await updates.run(WeightVersion(2))
        lost = three.pop(index)
        assert list(update.lost_engines) == [lost.name]
        for engine in three:
            assert_serves(engine, 2)
        # Until the fleet has ended it, it serves the version that it held before,
        # whole.
        assert_serves(lost, 1)
        assert not lost.traffic_on_mixed
        three[0].fail = three[1].fail = {}
        assert (await updates.run(WeightVersion(3))).version == 3

    @WAYS
    @pytest.mark.parametrize("phase", ["check", "pause", "load", "checksums", "commit"])
    async def test_all_engines_hold_the_old_version_if_none_passes(
        self,
        three: list[Receiver],
        phase: str,
        how: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        fail_in(three, phase, how, monkeypatch)
        with pytest.raises(WeightSyncError, match="engine-0") as raised:
            await updates.run(WeightVersion(2))
        assert raised.value.unrestored == ()
        assert [(e.weights, e.version, e.paused) for e in three] == [
            ("1", 1, False)
        ] * 3
        assert not any(engine.traffic_on_mixed for engine in three)
        assert (await updates.run(WeightVersion(2))).lost_engines == {}

    async def test_without_earlier_weights_written_engines_are_unrestored(
        self, three: list[Receiver]
    ) -> None:
        for engine in three:
            engine.fail = {"load": boom}
        with pytest.raises(WeightSyncError) as raised:
            await transaction(three, is_rolling=True).run(WeightVersion(1))
        assert raised.value.unrestored == ("engine-0", "engine-1", "engine-2")

    @pytest.mark.parametrize("phase", ["resume", "logprobs"])
    @pytest.mark.parametrize("index", [0, 1])
    async def test_rolling_update_loses_an_engine_that_fails_after_its_commit(
        self, three: list[Receiver], phase: str, index: int
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        three[index].fail = {phase: boom}
        update = await updates.run(WeightVersion(2))
        lost = three.pop(index)
        assert update.lost_engines == {
            lost.name: f"{lost.name} was lost after the commit: boom"
        }
        for engine in three:
            assert_serves(engine, 2)

    async def test_rolling_update_of_a_bad_model_stops_at_the_first_engine_and_restores_its_weights(
        self, three: list[Receiver]
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        for engine in three:
            engine.gap = 0.11
            engine.calls.clear()
        with pytest.raises(CanaryError, match="engine-0") as raised:
            await updates.run(WeightVersion(2))
        assert raised.value.unrestored == ()
        assert [(e.weights, e.version, e.paused) for e in three] == [
            ("1", 1, False)
        ] * 3
        assert [engine.calls for engine in three[1:]] == [["check"]] * 2
        assert not any(engine.traffic_on_mixed for engine in three)
        joining_engine = Receiver("engine-3")
        # the fleet's version is the old one
        await updates.bring_up(joining_engine, Joined(three, joining_engine))
        assert joining_engine.version == 1

    async def test_engine_that_cannot_be_rolled_back_is_named(
        self, three: list[Receiver]
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        three[0].gap = 0.11
        loads = iter([None, boom])
        load = three[0].load

        async def second_fails(staged: StagedWeights) -> None:
            failure = next(loads)
            if failure is not None:
                failure()
            await load(staged)

        three[0].load = second_fails  # type: ignore[method-assign]
        with pytest.raises(CanaryError) as raised:
            await updates.run(WeightVersion(2))
        assert raised.value.unrestored == ("engine-0",)
        assert three[0].paused

    async def test_canary_error_of_a_later_engine_ends_the_rolling_update_without_undoing_it(
        self, three: list[Receiver]
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        three[1].gap = 0.11
        with pytest.raises(CanaryError, match="engine-1"):
            await updates.run(WeightVersion(2))
        assert [(e.weights, e.version, e.paused) for e in three] == [
            ("2", 2, False),
            ("2", 2, False),
            ("1", 1, False),
        ]

    @pytest.mark.parametrize(
        "phase", ["pause", "load", "checksums", "commit", "resume"]
    )
    async def test_rolling_update_cancelled_in_any_phase_leaves_every_engine_whole_and_running(
        self, three: list[Receiver], phase: str
    ) -> None:
        updates = transaction(three, is_rolling=True)
        await updates.run(WeightVersion(1))
        reached = asyncio.Event()
        release = asyncio.Event()
        first = three[1]._phase

        async def slow(at: str) -> None:
            if at == phase and not reached.is_set():
                reached.set()
                await release.wait()
            await first(at)

        three[1]._phase = slow  # type: ignore[method-assign]
        task = asyncio.create_task(updates.run(WeightVersion(2)))
        await reached.wait()
        task.cancel()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            while any(engine.paused for engine in three):
                await asyncio.sleep(0.001)
        assert [engine.weights for engine in three] == [
            str(engine.version) for engine in three
        ]
        assert not any(engine.traffic_on_mixed for engine in three)


def test_canary_bound_follows_the_coarsest_dtype() -> None:
    fine = CanaryBound.for_dtypes("float32", "float32")
    assert fine.max_gap == 1e-3
    assert CanaryBound.for_dtypes("float32", "bfloat16").mean_gap > fine.mean_gap


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_canary_bounds_single_tokens_and_their_mean(dtype: str) -> None:
    """One token of a hundred that is far off moves the mean by little; a hundred that
    are off by less than a single one may be are another model, too."""
    bound = CanaryBound.for_dtypes(dtype)
    one_wrong = np.zeros(100, np.float32)
    one_wrong[7] = 1.5 * bound.max_gap
    if dtype == "bfloat16":
        assert np.abs(one_wrong).mean() < bound.mean_gap, (
            "the mean alone would let it pass"
        )
    all_wrong = np.full(100, 1.5 * bound.mean_gap, np.float32)
    for sign in (1, -1):
        with pytest.raises(CanaryError, match="another model"):
            bound.check("engine-0", sign * one_wrong, WeightVersion(1))
        with pytest.raises(CanaryError, match="another model"):
            bound.check("engine-0", sign * all_wrong, WeightVersion(1))
    for value in (np.nan, np.inf):
        with pytest.raises(CanaryError):
            bound.check(
                "engine-0", np.array([0.0, value], np.float32), WeightVersion(1)
            )
    within = np.full(100, 0.5 * bound.mean_gap, np.float32)
    within[3] = 0.9 * bound.max_gap
    if dtype == "bfloat16":
        assert bound.check("engine-0", within, WeightVersion(1))[0] == pytest.approx(
            0.9 * bound.max_gap
        )


# ------------------------------------------------ engines that sleep before an update


SLEEP_PHASES = pytest.mark.parametrize("phase", ["pause", "sleep"])


async def test_engines_sleep_from_suspension_to_commit(three: list[Receiver]) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    for engine in three:
        engine.calls.clear()
    assert await updates.suspend() == {}
    assert all(engine.asleep for engine in three)
    assert updates.phase == ""
    update = await updates.run(WeightVersion(2))
    for engine in three:
        assert_serves(engine, 2)
        assert engine.asleep is False
        assert engine.calls == [
            "pause",
            "sleep",
            "check",
            "load",
            "checksums",
            "commit",
            "wake",
            "resume",
            "logprobs",
        ]
    assert {"pause", "sleep", "wake", "paused"} <= update.seconds.keys()
    await updates.run(WeightVersion(3))
    assert three[0].calls[-7:] == [
        "check",
        "pause",
        "load",
        "checksums",
        "commit",
        "resume",
        "logprobs",
    ]


@WAYS
@SLEEP_PHASES
async def test_engine_that_does_not_fall_asleep_is_named_and_not_called_again(
    three: list[Receiver], phase: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = list(three)

    async def engines() -> Sequence[Receiver]:
        return fleet

    updates = transaction(three)
    updates.receivers = engines
    await updates.run(WeightVersion(1))
    fail_in([three[1]], phase, how, monkeypatch)
    assert list(await updates.suspend()) == ["engine-1"]
    del fleet[1]  # as the caller does
    num_calls = len(three[1].calls)
    update = await updates.run(WeightVersion(2))
    assert update.lost_engines == {}
    assert len(three[1].calls) == num_calls
    assert [(engine.version, engine.asleep) for engine in fleet] == [(2, False)] * 2


@WAYS
@SLEEP_PHASES
@pytest.mark.parametrize("first", [False, True])
async def test_engines_continue_under_the_old_version_if_none_falls_asleep(
    three: list[Receiver],
    phase: str,
    how: str,
    first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = transaction(three)
    if not first:
        await updates.run(WeightVersion(1))
    versions = [engine.version for engine in three]
    fail_in(three, phase, how, monkeypatch)
    with pytest.raises(WeightSyncError) as raised:
        await updates.suspend()
    assert raised.value.unrestored == ()
    assert [engine.version for engine in three] == versions
    assert not any(engine.paused or engine.asleep for engine in three)
    await updates.run(WeightVersion(2))  # and joining engines are admitted as before
    await updates.bring_up(Receiver("engine-3"), lambda: None)


@WAYS
@pytest.mark.parametrize("phase", ["check", "load", "checksums", "commit"])
async def test_an_update_that_fails_wakes_the_engines_with_the_old_version(
    three: list[Receiver], phase: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    await updates.suspend()
    fail_in(three, phase, how, monkeypatch)
    with pytest.raises(WeightSyncError) as raised:
        await updates.run(WeightVersion(2))
    assert raised.value.unrestored == ()
    for engine in three:
        assert_serves(engine, 1)
        assert engine.asleep is False
    await updates.suspend()
    update = await updates.run(WeightVersion(3))
    assert update.lost_engines == {}
    assert three[0].version == 3


async def test_weights_that_cannot_be_staged_leave_no_engine_asleep(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    await updates.suspend()

    async def fail(version: WeightVersion) -> StagedWeights:
        raise WeightSyncError("the disk is full")

    updates.sender.stage = fail  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="the disk is full"):
        await updates.run(WeightVersion(2))
    assert [(engine.version, engine.paused, engine.asleep) for engine in three] == [
        (1, False, False)
    ] * 3


@WAYS
async def test_engine_that_does_not_wake_after_the_commit_is_lost(
    three: list[Receiver], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = transaction(three)
    await updates.suspend()
    fail_in([three[1]], "wake", how, monkeypatch)
    update = await updates.run(WeightVersion(1))
    assert list(update.lost_engines) == ["engine-1"]
    assert "resume" not in three[1].calls, "it would compute without a cache"
    await updates.suspend()
    fail_in(three, "wake", how, monkeypatch)
    with pytest.raises(WeightSyncError, match="every engine was lost"):
        await updates.run(WeightVersion(2))


async def test_new_engine_does_not_join_while_others_sleep(
    three: list[Receiver],
) -> None:
    updates = transaction(three)
    await updates.run(WeightVersion(1))
    await updates.suspend()
    joined = asyncio.Event()
    joining_engine = Receiver("engine-3")
    coming = asyncio.create_task(updates.bring_up(joining_engine, joined.set))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not joined.is_set()
    await updates.run(WeightVersion(2))
    await coming
    assert joined.is_set()
    assert joining_engine.version == 2
    assert joining_engine.asleep is False
