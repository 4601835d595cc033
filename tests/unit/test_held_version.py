"""The version that the trainer's parameters are, as its handle tells it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from invrl.errors import TrainError
from invrl.interfaces import StagedWeights
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.trainer.train_handle import TrainHandle
from invrl.types.batches import TrainBatch
from invrl.types.weights import WeightVersion

FIRST = WeightVersion(1)


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> TrainHandle:
    """A trainer that stages, and can do nothing else."""
    handle = TrainHandle(
        [cast(Any, object())],
        layout=ParallelLayout(),
        num_mini_batches=1,
        start_timeout_s=1.0,
        step_timeout_s=1.0,
    )

    async def reply(ranks, method, *arguments) -> dict[int, Any]:
        if method.__name__ == "bucket":
            index, copies = arguments
            return {0: [f"bucket {index}"] * copies}
        version = arguments[0]
        staged = StagedWeights(version=version, handle="", checksums={}, num_bytes=0)
        return {0: staged}

    async def fail(*arguments) -> None:
        raise TrainError("a rank has died")

    monkeypatch.setattr(handle, "_call", reply)
    monkeypatch.setattr(handle, "_shards", lambda batch, group: [])
    monkeypatch.setattr(handle, "_call_with_shards", fail)
    monkeypatch.setattr(handle, "_call_group", fail)
    return handle


async def test_trainer_holds_what_it_staged_last(trainer: TrainHandle) -> None:
    assert not trainer.holds(FIRST)
    await trainer.stage(FIRST)
    assert trainer.holds(FIRST)
    assert await trainer.bucket(3, 2) == ["bucket 3", "bucket 3"]
    await trainer.stage(WeightVersion(2))
    assert not trainer.holds(FIRST)


async def test_trainer_that_trains_holds_no_version(trainer: TrainHandle) -> None:
    """Even if the step fails: nobody knows how far it came."""
    await trainer.stage(FIRST)
    with pytest.raises(TrainError):
        await trainer.train(cast(TrainBatch, object()))
    assert not trainer.holds(FIRST)


async def test_trainer_that_loads_a_checkpoint_holds_no_version(
    trainer: TrainHandle,
) -> None:
    await trainer.stage(FIRST)
    with pytest.raises(TrainError):
        await trainer.load_checkpoint("folder")
    assert not trainer.holds(FIRST)
