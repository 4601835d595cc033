"""Engines that come back while updates go on, in every order of what happens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.errors import WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.joining_engines import JoiningEngines
from invrl.weights.update.transaction import WeightTransaction

SPEC = TensorSpec(name="w", shape=(1,), dtype="float32")


async def settle() -> None:
    """Let everything run that does not wait for a gate."""
    for _ in range(50):
        await asyncio.sleep(0)


class Gate:
    """Holds whoever comes, until it is let through."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self._is_open = False

    async def pass_through(self) -> None:
        if not self._is_open:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def let_one_through(self) -> None:
        if self._waiting:
            self._waiting.pop(0).set_result(None)

    def open(self) -> None:
        self._is_open = True
        while self._waiting:
            self.let_one_through()


class Fleet:
    """Engines, and a trainer with two slots. Each asserts what must not happen."""

    def __init__(self) -> None:
        self.gates = {
            name: Gate() for name in ("stage", "load", "joining_engine loads", "prove")
        }
        self.slots = ["", ""]
        self.readers = [0, 0]
        self.engines: list[Engine] = []
        self.transaction = WeightTransaction(
            self,
            self.receivers,
            canary_prompts=[[1, 2]],
            bound=CanaryBound(max_gap=0.1, mean_gap=0.1),
        )

    async def receivers(self) -> Sequence[Engine]:
        return list(self.engines)

    async def layout(self) -> WeightLayout:
        return (SPEC,)

    async def stage(self, version: WeightVersion) -> StagedWeights:
        slot = version % 2
        assert self.readers[slot] == 0, "a slot is written while an engine reads it"
        self.slots[slot] = "half written"
        await self.gates["stage"].pass_through()
        assert self.readers[slot] == 0, (
            "an engine began to read a slot that is being written"
        )
        self.slots[slot] = str(version)
        return StagedWeights(
            version=version,
            handle=str(slot),
            checksums={"w": str(version)},
            num_bytes=1,
        )

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]

    async def update(self, version: int) -> None:
        update = await self.transaction.run(WeightVersion(version))
        assert update.lost_engines == {}
        assert [engine.version for engine in self.engines] == [version] * len(
            self.engines
        )

    async def bring_up(self, name: str) -> None:
        engine = Engine(name, self)

        def join() -> None:
            committed = self.transaction.committed
            assert committed is not None
            assert engine.version == committed.staged.version
            self.engines.append(engine)

        await self.transaction.bring_up(engine, join)


class Engine:
    def __init__(self, name: str, fleet: Fleet) -> None:
        self.name = name
        self.version = 0
        self._weights = ""
        self._fleet = fleet
        self.num_loads = 0

    async def check(self, layout: WeightLayout, staged: StagedWeights) -> None: ...
    async def pause(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def resume(self) -> None: ...

    async def load(self, staged: StagedWeights) -> None:
        slot = int(staged.handle)
        self.num_loads += 1
        self._fleet.readers[slot] += 1
        try:
            gate = "load" if self in self._fleet.engines else "joining_engine loads"
            await self._fleet.gates[gate].pass_through()
            self._weights = self._fleet.slots[slot]
        finally:
            self._fleet.readers[slot] -= 1

    async def checksums(self, staged: StagedWeights) -> Mapping[str, str]:
        return {"w": self._weights}

    async def commit(self, version: WeightVersion) -> None:
        self.version = version

    async def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        await self._fleet.gates["prove"].pass_through()
        return [np.zeros(len(ids) - 1, np.float32) for ids in prompts]


ACTIONS = ("joining_engine", "update", "stage", "load", "joining_engine loads", "prove")


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(ACTIONS), max_size=40))
def test_no_order_of_events_tears_a_slot_or_blocks_an_engine(
    actions: list[str],
) -> None:
    """`Fleet` and its engines assert the invariants as things happen."""
    asyncio.run(run_story(actions))


async def run_story(actions: Sequence[str]) -> None:
    fleet = Fleet()
    fleet.engines.append(Engine("engine-0", fleet))
    version = 0
    num_joining_engines = 0
    updating: asyncio.Task[None] | None = None
    tasks: list[asyncio.Task[None]] = []
    for action in ["update", *actions]:
        if (
            action == "joining_engine"
            and fleet.transaction.committed is not None
            and num_joining_engines < 3
        ):
            num_joining_engines += 1
            tasks.append(
                asyncio.create_task(fleet.bring_up(f"engine-{num_joining_engines}"))
            )
        elif action == "update" and (updating is None or updating.done()):
            version += 1
            updating = asyncio.create_task(fleet.update(version))
            tasks.append(updating)
        elif action in fleet.gates:
            fleet.gates[action].let_one_through()
        await settle()
    for gate in fleet.gates.values():
        gate.open()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    assert len(fleet.engines) == 1 + num_joining_engines
    assert {engine.version for engine in fleet.engines} == {version}


async def test_new_engine_loads_at_most_twice_before_it_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However fast the updates come: they wait for its second load."""
    fleet = Fleet()
    for gate in fleet.gates.values():
        gate.open()
    fleet.engines.append(Engine("engine-0", fleet))
    await fleet.update(1)
    slow = Gate()
    fast_load = Engine.load

    async def load(engine: Engine, staged: StagedWeights) -> None:
        if engine.name == "engine-1":
            await slow.pass_through()
        await fast_load(engine, staged)

    monkeypatch.setattr(Engine, "load", load)
    coming = asyncio.create_task(fleet.bring_up("engine-1"))
    await settle()
    await fleet.update(2)
    slow.let_one_through()  # version 1, which is old
    await settle()
    third = asyncio.create_task(fleet.update(3))
    await settle()
    assert fleet.slots[1] == "3"  # staged beside the second load
    assert not third.done()
    slow.open()
    await asyncio.gather(coming, third)
    joining_engine = fleet.engines[1]
    # twice alone, once in the update
    assert joining_engine.version == 3
    assert joining_engine.num_loads == 3


class TestGivenUp:
    """A deadline that passes costs the joining_engine, not the update."""

    async def test_new_engine_that_reads_an_old_version_for_too_long_is_given_up(
        self,
    ) -> None:
        joining_engines = JoiningEngines(deadline_s=0.01)

        async def read() -> None:
            async with joining_engines.reading("engine-1", WeightVersion(1)):
                await asyncio.Event().wait()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await joining_engines.wait_until_only_reads(WeightVersion(1))
        assert not reading.done()
        await joining_engines.wait_until_only_reads(WeightVersion(2))
        reason = r"engine-1 is given up: an update waited 0.01 s for it to finish with a version older than 2"
        with pytest.raises(WeightSyncError, match=reason):
            await reading

    async def test_new_engine_that_takes_too_long_for_its_second_load_is_given_up(
        self,
    ) -> None:
        joining_engines = JoiningEngines(deadline_s=0.01)

        async def read() -> None:
            async with joining_engines.reading(
                "engine-1", WeightVersion(1), holds_updates=True
            ):
                await asyncio.Event().wait()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await joining_engines.wait_for_joins()
        with pytest.raises(WeightSyncError, match="for it to finish"):
            await reading

    async def test_update_does_not_wait_for_the_end_of_a_given_up_engine(self) -> None:
        joining_engines = JoiningEngines(deadline_s=0.01)
        may_end = asyncio.Event()

        async def read() -> None:
            async with joining_engines.reading("engine-1", WeightVersion(1)):
                try:
                    await asyncio.Event().wait()
                finally:
                    await may_end.wait()

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await joining_engines.wait_until_only_reads(WeightVersion(2))
        assert not reading.done()
        may_end.set()
        with pytest.raises(WeightSyncError, match="given up"):
            await reading

    async def test_error_of_a_new_engine_keeps_its_type(self) -> None:
        joining_engines = JoiningEngines(deadline_s=0.01)
        with pytest.raises(TimeoutError, match="mine"):
            async with joining_engines.reading("engine-1", WeightVersion(1)):
                raise TimeoutError("mine")
        await joining_engines.wait_until_only_reads(WeightVersion(2))
