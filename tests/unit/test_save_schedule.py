"""When a checkpoint is due, by a clock that the test holds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from invrl.run.checkpoints.save_schedule import SaveSchedule


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def due_steps(
    schedule: SaveSchedule, clock: Clock, *, steps: int, step_s: float, save_s: float
) -> list[int]:
    """Of so many steps, each taking `step_s`, and a save `save_s` beside that."""
    schedule.begin()
    due = []
    for step in range(1, steps + 1):
        clock.now += step_s
        if schedule.is_due(step):
            due.append(step)
            clock.now += save_s
            schedule.saved(save_s)
    return due


def test_save_interval_in_steps_takes_precedence() -> None:
    clock = Clock()
    schedule = SaveSchedule(steps=4, seconds=1.0, clock=clock)
    assert due_steps(schedule, clock, steps=9, step_s=100.0, save_s=50.0) == [4, 8]


def test_save_is_due_by_the_seconds_since_the_last_save() -> None:
    clock = Clock()
    schedule = SaveSchedule(seconds=300.0, clock=clock)
    assert due_steps(schedule, clock, steps=10, step_s=100.0, save_s=1.0) == [3, 6, 9]


def test_steps_longer_than_the_interval_are_all_saved() -> None:
    clock = Clock()
    schedule = SaveSchedule(seconds=300.0, clock=clock)
    assert due_steps(schedule, clock, steps=3, step_s=900.0, save_s=1.0) == [1, 2, 3]


@pytest.mark.parametrize("save_s", [30.0, 200.0])
def test_saving_takes_at_most_a_twentieth_of_the_time(save_s: float) -> None:
    clock = Clock()
    schedule = SaveSchedule(seconds=300.0, clock=clock)
    due = due_steps(schedule, clock, steps=1000, step_s=10.0, save_s=save_s)
    assert len(due) >= 2
    pauses_s = [(later - earlier) * 10.0 for earlier, later in itertools.pairwise(due)]
    assert all(save_s / (pause_s + save_s) < 0.05 for pause_s in pauses_s)


@pytest.mark.parametrize(
    "schedule",
    [
        SaveSchedule(),
        SaveSchedule(seconds=0.0, clock=Clock()),
    ],
)
def test_no_save_is_due_without_a_schedule(schedule: SaveSchedule) -> None:
    schedule.begin()
    assert not any(schedule.is_due(step) for step in range(1, 100))
