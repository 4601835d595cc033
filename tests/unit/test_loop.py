"""The loop over parts that only note what they are asked."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from loop_parts import (
    EmptyBatches,
    FixedSteps,
    Notes,
    assemble_nothing,
    save_nothing,
    sync_at_once,
)
from small_buffer import summary

from invrl.observe.metrics.step_metrics import time_metrics
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.types.batches import TakenBatch, TrainBatch, TrainSample
from invrl.types.groups import Group
from invrl.types.metrics import resolve
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightUpdate, WeightVersion


@pytest.mark.parametrize(
    "steps",
    [
        [1, 0, 1, 0],
        [0, 0, 0, 0],
        [1, 1, 1, 1],
    ],
)
async def test_batch_that_changed_no_weight_is_noted_counted_and_makes_a_version(
    steps: list[int],
) -> None:
    observer = Notes()
    buffer = EmptyBatches()
    synced = list[int]()

    async def sync(version: WeightVersion) -> WeightUpdate:
        synced.append(version)
        return await sync_at_once(version)

    learner = Learner(trainer=FixedSteps(steps), sync=sync, save=save_nothing)
    parts = Parts(
        buffer=buffer, assemble=assemble_nothing, observer=observer, learner=learner
    )
    await run_loop(parts, done=0, num_steps=len(steps))
    silent = [
        at for at, optimizer_steps in enumerate(steps, start=1) if optimizer_steps == 0
    ]
    assert [note.split(":")[0] for note in observer.notes] == [
        f"step {step}" for step in silent
    ]
    assert all("no weight was changed" in note for note in observer.notes)
    skipped = [
        step for step, row in observer.rows.items() if row["train/skipped_steps"] == 1
    ]
    assert skipped == silent
    assert synced == [1, 2, 3, 4]
    assert buffer.versions == [1, 2, 3]


class OneReplyEach(EmptyBatches):
    """Batches of three groups of two rollouts, whose rewards are equal in each
    group."""

    async def take(self) -> TakenBatch:
        groups: list[Group] = []
        for number in range(3):
            rollouts_G = tuple(
                summary(f"g{number}", index, reward=float(number > 0))
                for index in range(2)
            )
            groups.append(Group(id=f"g{number}", task_id="t", rollouts_G=rollouts_G))
        version = WeightVersion(len(self.versions))
        return TakenBatch(batch_id=version, version=version, groups=tuple(groups))


def sampled(rollout: RolloutSummary, token: int) -> TrainSample:
    """A row whose only trained token is this one."""
    return TrainSample(
        tokens_T=np.array([1, token], np.int32),
        loss_mask_T=np.array([False, True]),
        rollout_logprobs_T=np.zeros(2, np.float32),
        versions_T=np.array([-1, 0], np.int32),
        reward=rollout.reward,
        temperature=1.0,
        group_id=rollout.group_id,
        rollout_id=rollout.session_id,
        attempt=0,
        turn_ids=(),
    )


@pytest.mark.parametrize("resumed_at", [0, 4, 5])
async def test_a_collapse_is_told_once_and_its_consequences_no_more(
    resumed_at: int,
) -> None:
    """Two replies to each task in the first step, one in the others. A resumed run
    tells it again, whatever came before the resume."""
    observer = Notes()

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        samples: list[TrainSample] = []
        for number, group in enumerate(taken.groups):
            for rollout in group.rollouts_G:
                token = 10 * number + (rollout.index if step == 1 else 0)
                samples.append(sampled(rollout, token))
        return TrainBatch(
            batch_id=taken.batch_id,
            version=taken.version,
            samples=tuple(samples),
            advantages=(np.zeros(2, np.float32),) * len(samples),
        )

    learner = Learner(
        trainer=FixedSteps([1, 0, 0, 0, 0, 0]), sync=sync_at_once, save=save_nothing
    )
    parts = Parts(
        buffer=OneReplyEach(), assemble=assemble, observer=observer, learner=learner
    )
    await run_loop(parts, done=0, num_steps=6)
    if resumed_at:
        rows = [{"step": step, **row} for step, row in observer.rows.items()]
        observer = Notes()
        learner = replace(learner, trainer=FixedSteps([0] * 6))
        parts = replace(
            parts,
            observer=observer,
            learner=learner,
            earlier_rows=rows[:resumed_at],
        )
        await run_loop(parts, done=resumed_at, num_steps=6)
    told = max(4, resumed_at + 1)
    notes = [
        note.partition(":")[0]
        for note in observer.notes
        if "no weight was changed" in note
    ]
    first = resumed_at + 1 if resumed_at else 2
    assert notes == [f"step {step}" for step in range(first, told + 1)]
    [collapsed] = [note for note in observer.notes if "collapsed" in note]
    assert collapsed.startswith(f"step {told}: the policy has collapsed: since step 2")
    assert observer.notes[-1] == collapsed


async def test_batch_is_assembled_outside_of_the_event_loop() -> None:
    """What the run is watched by goes on meanwhile: here it is what lets the assembling
    end."""
    watched = threading.Event()

    def assemble(step: int, taken: TakenBatch) -> TrainBatch:
        assert watched.wait(120), (
            "the event loop stood still while the batch was assembled"
        )
        return TrainBatch(
            batch_id=taken.batch_id, version=taken.version, samples=(), advantages=()
        )

    async def watch() -> None:
        watched.set()

    parts = Parts(
        buffer=EmptyBatches(), assemble=assemble, observer=Notes(), learner=None
    )
    loop = asyncio.create_task(run_loop(parts, done=0, num_steps=1))
    await asyncio.sleep(0)
    watching = asyncio.create_task(watch())
    await asyncio.gather(loop, watching)


async def test_a_resumed_run_goes_on_with_the_step_after_its_checkpoint() -> None:
    observer = Notes()
    parts = Parts(
        buffer=EmptyBatches(),
        assemble=assemble_nothing,
        observer=observer,
        learner=None,
    )
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
async def test_checkpoints_are_saved_by_the_schedule_and_after_the_last_step(
    schedule: dict[str, float], expected: list[int]
) -> None:
    """A step takes 10 s."""
    clock = Clock()
    saved: list[int] = []

    async def sync(version: WeightVersion) -> WeightUpdate:
        clock.now += 10.0
        return await sync_at_once(version)

    async def save(step: int, snapshot: bytes) -> None:
        saved.append(step)

    observer = Notes()
    learner = Learner(
        trainer=FixedSteps([1] * 5),
        sync=sync,
        save=save,
        schedule=SaveSchedule(
            steps=int(schedule.get("steps", 0)),
            seconds=schedule.get("seconds", 0.0),
            clock=clock,
        ),
    )
    parts = Parts(
        buffer=EmptyBatches(),
        assemble=assemble_nothing,
        observer=observer,
        learner=learner,
    )
    await run_loop(parts, done=0, num_steps=5)
    assert saved == expected
    assert [
        step for step, row in observer.rows.items() if "time/checkpoint_s" in row
    ] == expected


def test_step_time_excludes_the_checkpoint() -> None:
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=())
    seconds = {"rollout": 4.0, "train": 2.0, "sync": 1.0, "checkpoint": 20.0}
    values = resolve(time_metrics(seconds, taken, 10.0), "time/")
    assert values["time/step_s"] == 7.0
    assert values["time/checkpoint_s"] == 20.0
