"""The loop over parts that only note what they are asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import pytest

from invrl.file_entry import FileEntries
from invrl.interfaces import StepResult
from invrl.metrics import Max, Metric, resolve
from invrl.observe.sinks import Sink
from invrl.observe.step_metrics import time_metrics
from invrl.run.loop import Learner, Parts, run_loop
from invrl.run.save_schedule import SaveSchedule
from invrl.types import GroupLease, Outcome, TakenBatch, TrainBatch, WeightUpdate, WeightVersion


class Notes(Sink):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: dict[int, Mapping[str, float]] = {}

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.rows[step] = values


class EmptyBatches:
    """A buffer whose batches hold no group; the versions that it was told."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    async def lease(self) -> GroupLease | None:
        return None

    async def record(self, outcome: Outcome) -> None: ...

    async def take(self) -> TakenBatch:
        return TakenBatch(batch_id=len(self.versions), version=WeightVersion(len(self.versions)), groups=())

    async def trained(self, batch_id: int) -> None: ...

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return b""

    async def advance(self, version: WeightVersion) -> None:
        self.versions.append(version)

    async def metrics(self) -> Mapping[str, Metric]:
        return {}


class FixedSteps:
    """A trainer that makes so many optimizer steps of each batch."""

    def __init__(self, optimizer_steps: list[int]) -> None:
        self._steps = iter(optimizer_steps)

    async def train(self, batch: TrainBatch) -> StepResult:
        made = next(self._steps)
        return StepResult(
            optimizer_steps=made, nonfinite_steps=0, metrics={"skipped_steps": Max(1 - made)}, seconds={}
        )

    async def save_checkpoint(self, path: str) -> FileEntries:
        return {}

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        return {}


@pytest.mark.parametrize("steps", [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
async def test_a_batch_that_changed_no_weight_is_told_counted_and_still_makes_its_version(
    steps: list[int],
) -> None:
    observer, buffer, synced = Notes(), EmptyBatches(), list[int]()

    async def sync(version: WeightVersion) -> WeightUpdate:
        synced.append(version)
        return WeightUpdate(version=version, num_bytes=0, seconds={}, canary_max_gap=0.0, canary_mean_gap=0.0)

    async def save(step: int, snapshot: bytes) -> None: ...

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        return TrainBatch(batch_id=taken.batch_id, version=taken.version, samples=(), advantages=())

    learner = Learner(trainer=FixedSteps(steps), sync=sync, save=save)
    parts = Parts(buffer=buffer, assemble=assemble, observer=observer, learner=learner)
    await run_loop(parts, done=0, num_steps=len(steps))
    silent = [at for at, made in enumerate(steps, start=1) if made == 0]
    assert [note.split(":")[0] for note in observer.notes] == [f"step {step}" for step in silent]
    assert all("no weight was changed" in note for note in observer.notes)
    skipped = [step for step, row in observer.rows.items() if row["train/skipped_steps"] == 1]
    assert skipped == silent
    assert synced == [1, 2, 3, 4]
    assert buffer.versions == [1, 2, 3]


async def test_a_batch_is_assembled_beside_the_event_loop() -> None:
    """What the run is watched by goes on meanwhile: here it is what lets the assembling end."""
    watched = threading.Event()

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        assert watched.wait(120), "the event loop stood still while the batch was assembled"
        return TrainBatch(batch_id=taken.batch_id, version=taken.version, samples=(), advantages=())

    async def watch() -> None:
        watched.set()

    parts = Parts(buffer=EmptyBatches(), assemble=assemble, observer=Notes(), learner=None)
    loop = asyncio.create_task(run_loop(parts, done=0, num_steps=1))
    await asyncio.sleep(0)
    watching = asyncio.create_task(watch())
    await asyncio.gather(loop, watching)


async def test_a_resumed_run_goes_on_with_the_step_after_its_checkpoint() -> None:
    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        return TrainBatch(batch_id=taken.batch_id, version=taken.version, samples=(), advantages=())

    observer = Notes()
    parts = Parts(buffer=EmptyBatches(), assemble=assemble, observer=observer, learner=None)
    assert await run_loop(parts, done=2, num_steps=4) == 4
    assert list(observer.rows) == [3, 4]
    assert await run_loop(parts, done=4, num_steps=4) == 4
    assert list(observer.rows) == [3, 4]


class Clock:
    """Goes on only when it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"steps": 2}, [2, 4, 5]),
        ({"seconds": 30.0}, [3, 5]),
        ({}, [5]),
    ],
)
async def test_checkpoints_come_by_the_schedule_and_last(
    schedule: dict[str, float], expected: list[int]
) -> None:
    """A step takes 10 s."""
    clock = Clock()
    saved: list[int] = []

    async def sync(version: WeightVersion) -> WeightUpdate:
        clock.now += 10.0
        return WeightUpdate(version=version, num_bytes=0, seconds={}, canary_max_gap=0.0, canary_mean_gap=0.0)

    async def save(step: int, snapshot: bytes) -> None:
        saved.append(step)

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        return TrainBatch(batch_id=taken.batch_id, version=taken.version, samples=(), advantages=())

    observer = Notes()
    learner = Learner(
        trainer=FixedSteps([1] * 5),
        sync=sync,
        save=save,
        schedule=SaveSchedule(
            steps=int(schedule.get("steps", 0)), seconds=schedule.get("seconds", 0.0), clock=clock
        ),
    )
    parts = Parts(buffer=EmptyBatches(), assemble=assemble, observer=observer, learner=learner)
    await run_loop(parts, done=0, num_steps=5)
    assert saved == expected
    assert [step for step, row in observer.rows.items() if "time/checkpoint_s" in row] == expected


def test_the_time_of_a_step_is_without_its_checkpoint() -> None:
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=())
    seconds = {"rollout": 4.0, "train": 2.0, "sync": 1.0, "checkpoint": 20.0}
    values = resolve(time_metrics(seconds, taken, 10.0), "time/")
    assert values["time/step_s"] == 7.0
    assert values["time/checkpoint_s"] == 20.0
