"""Whose turn it is, over parts that note what they are asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from loop_parts import sync_at_once
from numpy.typing import NDArray

from invrl.errors import WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.run.loop.gpu_turns import GpuTurns, SenderThatSleeps
from invrl.types.weights import WeightUpdate, WeightVersion


class Noting:
    """Trainer, fleet and updates in one."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_in = ""
        self.sender = SenderThatSleeps(self)

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise WeightSyncError(call)

    async def hold_starts(self) -> None:
        self.note("hold starts")

    def allow_starts(self) -> None:
        self.note("allow starts")

    async def until_lost_have_ended(self) -> None:
        self.note("lost engines end")

    async def suspend(self) -> None:
        self.note("engines sleep")

    async def update(self, version: WeightVersion) -> WeightUpdate:
        await self.sender.stage(version)
        self.note("engines wake")
        return await sync_at_once(version)

    async def wake(self) -> int:
        self.note("trainer wakes")
        return 0

    async def sleep(self) -> int:
        self.note("trainer sleeps")
        return 0

    async def layout(self) -> WeightLayout:
        return ()

    async def stage(self, version: WeightVersion) -> StagedWeights:
        self.note("stage")
        return StagedWeights(version=version, handle="", checksums={}, num_bytes=0)

    async def logprobs(
        self, prompts: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        return []


TO_TRAINER = ["hold starts", "engines sleep", "lost engines end", "trainer wakes"]
TO_ENGINES = ["stage", "trainer sleeps", "engines wake", "allow starts"]


def turns(parts: Noting) -> GpuTurns:
    return GpuTurns(parts, parts, suspend=parts.suspend, update=parts.update)


async def test_gpu_memory_is_freed_before_the_other_side_takes_it() -> None:
    parts = Noting()
    both = turns(parts)
    for step in (1, 2):
        await both.give_to_trainer()
        await both.update(WeightVersion(step))
    assert parts.calls == [*TO_TRAINER, *TO_ENGINES] * 2


async def test_engines_that_fail_to_sleep_keep_their_turn() -> None:
    parts = Noting()
    parts.fails_in = "engines sleep"
    with pytest.raises(WeightSyncError):
        await turns(parts).give_to_trainer()
    assert parts.calls == ["hold starts", "engines sleep", "allow starts"]


@pytest.mark.parametrize("phase", TO_ENGINES[:-1])
async def test_turn_of_the_trainer_ends_even_if_its_update_fails(phase: str) -> None:
    parts = Noting()
    both = turns(parts)
    await both.give_to_trainer()
    parts.fails_in = phase
    with pytest.raises(WeightSyncError):
        await both.update(WeightVersion(1))
    assert parts.calls[-1] == "allow starts"
