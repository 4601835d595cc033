"""The least time of a run under the rule `wait`, where it is known by hand, and beside
runs of the real buffer."""

from __future__ import annotations

import pytest
from virtual_run import Setting, virtual_run

from benchmarks.asynchrony import waiting_tokens_per_s
from benchmarks.waiting_optimum import Pace, least_seconds


def pace(**changes: float) -> Pace:
    values = {"slots": 4, "token_s": 0.01, "request_s": 0.001, "training_s": 0.0}
    return Pace(**(values | changes))  # type: ignore[arg-type]


def test_synchronous_batch_ends_with_its_longest_rollout() -> None:
    seconds = least_seconds([[10, 5]], max_staleness=0, pace=pace(training_s=1.0))
    assert seconds == pytest.approx(5 * 0.011 + 5 * 0.01 + 1.0)


def test_more_rollouts_than_slots_take_turns() -> None:
    seconds = least_seconds([[10] * 8], max_staleness=0, pace=pace())
    assert seconds == pytest.approx(20 * 0.013)


@pytest.mark.parametrize("training_s", [0.05, 0.2])
def test_equal_lengths_take_as_long_as_the_slower_part(training_s: float) -> None:
    batches = [[10] * 4] * 4
    seconds = least_seconds(batches, max_staleness=1, pace=pace(training_s=training_s))
    assert seconds == pytest.approx(4 * max(10 * 0.013, training_s))


def test_long_rollout_stretches_the_steps_that_it_may_last() -> None:
    """One of 30 tokens in each batch, and two steps to sample it in."""
    batches = [[30, 1, 1, 1]] * 6
    seconds = least_seconds(batches, max_staleness=1, pace=pace())
    assert seconds == pytest.approx(6 * (15 * 0.009 + 33 * 0.001))


def test_rollout_gets_one_token_a_step_whatever_the_number_of_slots() -> None:
    """Twenty of its 60 tokens are sampled while batch 3 is trained."""
    batches = [[60], [1], [1], [1]]
    seconds = least_seconds(batches, max_staleness=1, pace=pace(training_s=0.2))
    assert seconds == pytest.approx(4 * 0.2 + 40 * 0.01)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_no_run_is_faster(sigma: float) -> None:
    workload = Setting(groups=4, group_size=4, sigma=sigma).workload
    num_steps = 60
    run = virtual_run(workload, num_steps=num_steps, max_staleness=2, when_stale="wait")
    optimum = waiting_tokens_per_s(workload, 2, num_steps)
    assert 0.5 * optimum < run.tokens_per_s(after_step=3) < 1.02 * optimum
