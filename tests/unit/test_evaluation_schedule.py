"""When held-out evaluations run: beside the steps, and which versions they see."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import pytest
from handmade_rollouts import summary
from loop_parts import (
    EmptyBatches,
    Notes,
    assemble_nothing,
    save_nothing,
    sync_at_once,
)
from virtual_run import Setting

from invrl.buffer.config import BufferConfig
from invrl.errors import ServerError
from invrl.interfaces import StepResult
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.evaluation import evaluate
from invrl.rollout.workers.worker_actor import Assignment
from invrl.run.loop.evaluation_schedule import EvaluationPlace, EvaluationSchedule
from invrl.run.loop.held_out import evaluation_place
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.run.plan.jumping_clock import run_jumping
from invrl.run.plan.virtual_run import VirtualRun
from invrl.run.settings.config import Source, resolve
from invrl.store.metrics_file import MetricsRow
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.file_entry import FileEntries
from invrl.types.leases import GroupLease
from invrl.types.metrics import Max
from invrl.types.rollouts import RolloutSummary
from invrl.types.sessions import Purpose, Sampling, Session
from invrl.types.tasks import Task
from invrl.types.weights import WeightUpdate, WeightVersion

Rows = Sequence[MetricsRow]
ROLLOUT_S = 4.0
TRAINING_S = 6.0
STEP_S = ROLLOUT_S + TRAINING_S


class PacedBatches(EmptyBatches):
    async def take(self) -> TakenBatch:
        await asyncio.sleep(ROLLOUT_S)
        return await super().take()


class PacedTrainer:
    async def train(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(TRAINING_S)
        return StepResult(
            optimizer_steps=1,
            nonfinite_steps=0,
            metrics={"skipped_steps": Max(0)},
            seconds={},
        )

    async def save_checkpoint(self, path: str) -> FileEntries:
        return {}

    async def load_checkpoint(self, path: str) -> None: ...

    async def export_hugging_face(self, path: str) -> FileEntries:
        return {}


class AllRows(Notes):
    """Keeps every row of a step, with the time of its report."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[tuple[float, int, str]] = []
        self.scores: dict[int, Mapping[str, float]] = {}

    def step(self, step: int, values: Mapping[str, float]) -> None:
        kind = "step"
        if any(name.startswith("eval/") for name in values):
            kind = "evaluation"
            self.scores[step] = values
        self.reports.append((asyncio.get_running_loop().time(), step, kind))

    def ends_of(self, kind: str) -> list[tuple[int, float]]:
        return [(step, time) for time, step, found in self.reports if found == kind]


@dataclass
class Stage:
    """A loop whose evaluations take `evaluation_s`."""

    evaluation_s: float
    place: EvaluationPlace = "beside"
    interval: int = 2
    num_steps: int = 6
    observer: AllRows = field(default_factory=AllRows)
    version: int = 0
    measured: list[tuple[int, int, int]] = field(default_factory=list)
    """Asked version, and that of the engines at the start and the end."""
    running: int = 0
    most_running: int = 0

    async def measure(self, version: WeightVersion) -> Mapping[str, float]:
        began_under = self.version
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.evaluation_s)
        finally:
            self.running -= 1
        self.measured.append((version, began_under, self.version))
        return {"eval/accuracy": 0.5}

    def schedule(self) -> EvaluationSchedule:
        return EvaluationSchedule(
            self.measure,
            self.observer,
            interval=self.interval,
            num_steps=self.num_steps,
            place=self.place,
        )

    async def sync(self, version: WeightVersion) -> WeightUpdate:
        self.version = version
        return await sync_at_once(version)

    async def run(self, done: int = 0, rows: Rows = ()) -> int:
        evaluations = self.schedule()
        self.version = done
        parts = Parts(
            buffer=PacedBatches(),
            assemble=assemble_nothing,
            observer=self.observer,
            learner=Learner(trainer=PacedTrainer(), sync=self.sync, save=save_nothing),
            evaluations=evaluations,
        )
        steps = partial(run_loop, parts, done=done, num_steps=self.num_steps)
        return await evaluations.guard(steps, done=done, rows=rows)


def test_steps_do_not_wait_for_an_evaluation() -> None:
    stage = Stage(evaluation_s=1.5 * STEP_S)
    assert run_jumping(stage.run()) == 6
    assert stage.observer.ends_of("step") == [
        (step, step * STEP_S) for step in range(1, 7)
    ]
    assert stage.observer.ends_of("evaluation") == [(2, 35.0), (4, 55.0)]
    assert stage.measured == [(2, 2, 3), (4, 4, 5)]
    assert stage.observer.notes == []


def test_evaluation_of_one_version_delays_the_next_weight_update_alone() -> None:
    stage = Stage(evaluation_s=1.5 * STEP_S, place="one_version")
    run_jumping(stage.run())
    assert stage.measured == [(2, 2, 2), (4, 4, 4)]
    assert stage.observer.ends_of("step") == [
        (1, 10.0),
        (2, 20.0),
        (3, 35.0),
        (4, 45.0),
        (5, 60.0),
        (6, 70.0),
    ]


def test_evaluation_that_is_alone_ends_before_the_next_step() -> None:
    stage = Stage(evaluation_s=1.5 * STEP_S, place="alone")
    run_jumping(stage.run())
    assert stage.measured == [(2, 2, 2), (4, 4, 4)]
    assert stage.observer.ends_of("step")[-1] == (6, 6 * STEP_S + 2 * 15.0)


def test_evaluation_that_is_due_while_another_runs_waits_for_it() -> None:
    stage = Stage(evaluation_s=2.5 * STEP_S)
    run_jumping(stage.run())
    assert stage.most_running == 1
    assert [asked for asked, *_ in stage.measured] == [2, 4]
    assert stage.observer.ends_of("evaluation") == [(2, 45.0), (4, 70.0)]
    [note] = stage.observer.notes
    assert note.startswith("step 4: training waits for the evaluation that began after")


def test_last_evaluation_is_awaited_after_the_last_step() -> None:
    stage = Stage(evaluation_s=9 * STEP_S, interval=5)
    run_jumping(stage.run())
    assert stage.observer.ends_of("evaluation") == [(5, 5 * STEP_S + 90.0)]


def test_failed_evaluation_ends_the_run_at_once() -> None:
    class Failing(Stage):
        async def measure(self, version: WeightVersion) -> Mapping[str, float]:
            await asyncio.sleep(1.0)
            raise ServerError("no engine is left")

    stage = Failing(evaluation_s=0.0)

    async def run() -> float:
        with pytest.raises(ServerError, match="no engine is left"):
            await stage.run()
        return asyncio.get_running_loop().time()

    assert run_jumping(run()) == 2 * STEP_S + 1.0


def test_end_of_the_run_ends_its_evaluation() -> None:
    stage = Stage(evaluation_s=9 * STEP_S)

    async def run() -> None:
        running = asyncio.create_task(stage.run())
        await asyncio.sleep(2.5 * STEP_S)
        assert stage.running == 1
        running.cancel()
        await asyncio.wait({running})

    run_jumping(run())
    assert stage.running == 0
    assert stage.observer.ends_of("evaluation") == []


@pytest.mark.parametrize(
    ("done", "rows", "measured"),
    [
        (2, [{"step": 2}], [(2, 2, 2), (4, 4, 4)]),
        (3, [{"step": 2}, {"step": 3}], [(3, 3, 3), (4, 4, 4)]),
        (3, [{"step": 2}, {"step": 2, "eval/accuracy": 0.5}], [(4, 4, 4)]),
        (1, [{"step": 0, "eval/accuracy": 0.5}], [(2, 2, 2), (4, 4, 4)]),
        (5, [{"step": 2, "eval/accuracy": 0.5}, {"step": 4}], [(5, 5, 5)]),
        (0, [], [(2, 2, 2), (4, 4, 4)]),
        (6, [{"step": 6}], []),
    ],
)
def test_resumed_run_repeats_an_evaluation_that_has_no_result(
    done: int,
    rows: Rows,
    measured: list[tuple[int, int, int]],
) -> None:
    stage = Stage(evaluation_s=0.5 * STEP_S)
    run_jumping(stage.run(done, rows))
    assert stage.measured == measured


def test_step_is_in_evaluation_until_its_values_are_reported() -> None:
    seen: list[int | None] = []

    class Watched(AllRows):
        def step(self, step: int, values: Mapping[str, float]) -> None:
            seen.append(schedule.step_in_evaluation())

    stage = Stage(evaluation_s=1.0, observer=Watched())
    schedule = stage.schedule()

    async def run() -> None:
        await schedule.after_step(2)
        seen.append(schedule.step_in_evaluation())
        await asyncio.sleep(2.0)
        seen.append(schedule.step_in_evaluation())

    run_jumping(run())
    assert seen == [2, 2, None]


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"buffer": {"max_staleness": 0}}, "one_version"),
        ({"buffer": {"max_staleness": 2}}, "beside"),
        ({"buffer": {"max_staleness": 2}, "run": {"colocate": True}}, "alone"),
    ],
)
def test_place_of_evaluations_follows_from_the_settings(
    settings: dict[str, dict[str, int | bool]], place: EvaluationPlace
) -> None:
    assert evaluation_place(resolve(Source(name="test", tables=settings))) == place


# ----------------------------------------------------------------- a whole run

SPARE_ROOM = Setting(groups=8, group_size=4, sigma=0.5, request_s=0.00002).workload
"""A further request makes a step of the engine 0.2 % longer."""
EVALUATED_AFTER = (6, 12, 18)


class HeldOutRollouts:
    """Sessions and workers of an evaluation in one, on the engines of a virtual
    run."""

    def __init__(self, run: VirtualRun) -> None:
        self._run = run

    async def open(
        self, lease: GroupLease, *, purpose: Purpose, sampling: Sampling
    ) -> list[Session]:
        return [
            Session(
                id=f"{lease.group_id}.{member.index}",
                key="",
                base_url="",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=member.index,
                attempt=member.attempt,
                purpose=purpose,
                sampling=sampling,
            )
            for member in lease.members
        ]

    async def run(self, assignment: Assignment) -> list[RolloutSummary]:
        (session,) = assignment.sessions
        oldest = self._run.version
        await self._run.engine.generate(700)
        rollout = summary(session.id, session.group_id, session.index, 1.0)
        newest = self._run.version
        return [replace(rollout, oldest_version=oldest, newest_version=newest)]


async def evaluated_run(place: EvaluationPlace | None, max_staleness: int) -> AllRows:
    """24 steps; each evaluation has 16 tasks, 8 at a time. None: no evaluation."""
    observer = AllRows()
    config = BufferConfig(max_staleness=max_staleness, group_filter="none")
    run = VirtualRun(SPARE_ROOM, config, observer=observer)
    rollouts = cast(Any, HeldOutRollouts(run))

    async def measure(version: WeightVersion) -> Mapping[str, float]:
        score = await evaluate(
            [Task(id=f"t{number}", payload={}) for number in range(16)],
            RolloutConfig(rollout_concurrency=8),
            mode="greedy",
            sessions=rollouts,
            pool=rollouts,
            group_form=False,
            label=str(version),
        )
        return score.values()

    schedule = None
    if place is not None:
        schedule = EvaluationSchedule(
            measure, observer, interval=6, num_steps=24, place=place
        )
    await run.make_steps(24, schedule)
    return observer


def seconds_after(run: AllRows, step: int) -> float:
    """Seconds of the two steps after this one."""
    ends = dict(run.ends_of("step"))
    return ends[step + 2] - ends[step]


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_step_with_an_evaluation_under_way_takes_as_long_as_one_without(
    max_staleness: int,
) -> None:
    without = run_jumping(evaluated_run(None, max_staleness))
    beside = run_jumping(evaluated_run("beside", max_staleness))
    alone = run_jumping(evaluated_run("alone", max_staleness))
    assert [step for step, _ in beside.ends_of("evaluation")] == list(EVALUATED_AFTER)
    for step, ended in beside.ends_of("evaluation"):
        begun = dict(beside.ends_of("step"))[step]
        assert ended - begun > 0.75 * seconds_after(without, step)
        assert seconds_after(beside, step) <= 1.05 * seconds_after(without, step)
        assert seconds_after(alone, step) > 1.4 * seconds_after(without, step)


@pytest.mark.parametrize(
    ("place", "max_staleness", "has_one_version"),
    [("beside", 1, False), ("one_version", 0, True), ("alone", 1, True)],
)
def test_versions_that_answered_an_evaluation_are_on_record(
    place: EvaluationPlace, max_staleness: int, has_one_version: bool
) -> None:
    run = run_jumping(evaluated_run(place, max_staleness))
    assert sorted(run.scores) == list(EVALUATED_AFTER)
    for step, values in run.scores.items():
        assert values["eval/greedy/oldest_version"] == step
        newest = values["eval/greedy/newest_version"]
        assert (newest == step) == has_one_version
