"""Evaluation: which rollouts it runs and counts, and its statistics against known values."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.rollout.evaluate import EvalScore, evaluate, gain_interval, wilson_interval
from invrl.types import FailedRollout, FailureReason, RolloutSummary, Sampling, Session, Task


def summary(session, reward):
    return RolloutSummary(
        session_id=session.id,
        task_id=session.task_id,
        group_id=session.group_id,
        index=session.index,
        attempt=session.attempt,
        reward=reward,
        num_turns=1,
        prompt_tokens=1,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=1,
        trained_tokens=1,
        truncated=False,
        oldest_version=0,  # type: ignore[arg-type]
        newest_version=0,  # type: ignore[arg-type]
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


class Stage:
    """Sessions and pool in one: `ends(task_id, index, attempt)` says how a rollout ends."""

    def __init__(self, ends):
        self.ends = ends
        self.opened = []
        self.running = self.most = 0

    async def open(self, lease, *, purpose="train", sampling=None, deadline_s=None):
        made = [
            Session(
                id=f"{lease.group_id}/{m.index}/{m.attempt}",
                key="k",
                base_url="http://gw/s/k/v1",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=m.index,
                attempt=m.attempt,
                purpose=purpose,
                sampling=sampling or Sampling(),
            )
            for m in lease.members
        ]
        self.opened.extend(made)
        return made

    async def abort(self, session, reason, detail):
        raise AssertionError("nothing to abort here")

    async def run(self, assignment):
        self.running += len(assignment.sessions)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= len(assignment.sessions)
        outcomes = []
        for s in assignment.sessions:
            end = self.ends(s.task_id, s.index, s.attempt)
            if isinstance(end, Exception):
                raise end
            outcomes.append(
                FailedRollout(
                    session_id=s.id,
                    task_id=s.task_id,
                    group_id=s.group_id,
                    index=s.index,
                    attempt=s.attempt,
                    reason=end,
                    detail="",
                )
                if isinstance(end, FailureReason)
                else summary(s, end)
            )
        return tuple(outcomes)


TASKS = [Task(id=f"t{i}", payload={}, split="eval") for i in range(6)]


async def run(stage, mode="sampled", samples=1, tasks=TASKS, concurrency=4, group_form=False):
    return await evaluate(
        tasks,
        mode=mode,
        samples_per_task=samples,
        max_new_tokens=14,
        sessions=stage,
        pool=stage,
        concurrency=concurrency,
        group_form=group_form,
        label="1",
    )


async def test_each_task_is_sampled_as_often_as_asked():
    stage = Stage(lambda task, index, attempt: 1.0 if index == 0 else 0.2)
    score = await run(stage, samples=2)
    assert score.task_ids == tuple(task.id for task in TASKS)
    assert score.rewards == ((1.0, 0.2),) * 6
    assert score.samples == 12
    assert score.mean_reward == pytest.approx(0.6)
    assert score.accuracy.value == 0.5
    assert {s.purpose for s in stage.opened} == {"eval"}
    assert {s.sampling for s in stage.opened} == {Sampling(temperature=1.0, max_new_tokens=14)}
    assert stage.most <= 4


async def test_greedy_is_one_sample_at_temperature_zero():
    stage = Stage(lambda *_: 1.0)
    score = await run(stage, mode="greedy", samples=4)
    assert score.samples == 6
    assert {s.sampling.temperature for s in stage.opened} == {0.0}


async def test_a_failed_rollout_scores_zero_and_is_counted():
    stage = Stage(lambda task, *_: FailureReason.EXCEPTION if task == "t3" else 1.0)
    score = await run(stage)
    assert score.rewards[3] == (0.0,)
    assert score.failures == {"exception": 1}
    assert score.accuracy.value == pytest.approx(5 / 6)
    assert score.values()["eval/sampled/failed"] == 1.0
    assert len(stage.opened) == 6


async def test_a_failure_of_ours_is_tried_again_at_its_place():
    def ends(task, index, attempt):
        if (task, index) == ("t1", 1) and attempt < 2:
            return FailureReason.WORKER_DIED
        return 1.0 if index else 0.5

    stage = Stage(ends)
    score = await run(stage, samples=2)
    assert score.rewards == ((0.5, 1.0),) * 6
    assert score.failures == {}
    assert len(stage.opened) == 14


async def test_tries_end():
    score = await run(Stage(lambda *_: FailureReason.ENGINE))
    assert score.failures == {"engine": 6}


async def test_a_group_form_gets_the_samples_of_a_task_together():
    stage = Stage(lambda *_: 1.0)
    sizes = []
    run_one = stage.run

    async def recorded(assignment):
        sizes.append(len(assignment.sessions))
        return await run_one(assignment)

    stage.run = recorded
    await run(stage, samples=3, group_form=True)
    assert sizes == [3] * 6


async def test_an_error_of_ours_is_raised_as_itself():
    with pytest.raises(ConnectionError):
        await run(Stage(lambda *_: ConnectionError("gone")))


# ------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    # As scipy.stats.binomtest(...).proportion_ci(method="wilson") gives them.
    [(25, 100, 0.1754521, 0.3430446), (0, 20, 0.0, 0.1611252), (20, 20, 0.8388748, 1.0)],
)
def test_wilson_interval(successes, n, low, high):
    interval = wilson_interval(successes, n)
    assert interval.value == successes / n
    assert interval.low == pytest.approx(low, abs=1e-6)
    assert interval.high == pytest.approx(high, abs=1e-6)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_interval_holds_its_value_and_mirrors(pair):
    successes, n = pair
    interval, mirrored = wilson_interval(successes, n), wilson_interval(n - successes, n)
    assert 0.0 <= interval.low <= interval.value + 1e-12
    assert interval.value - 1e-12 <= interval.high <= 1.0
    assert mirrored.low == pytest.approx(1 - interval.high, abs=1e-9)


def score(*rewards, mode="sampled"):
    return EvalScore(
        mode=mode,
        task_ids=tuple(str(i) for i in range(len(rewards))),
        rewards=tuple((reward,) for reward in rewards),
        failures={},
    )


def test_gain_counts_exact_answers_only():
    gain = gain_interval(score(0.2, 0.2, 1.0, 1.0), score(0.9, 1.0, 1.0, 1.0))
    assert gain.value == 0.25


def test_gain_agrees_with_the_normal_interval_of_paired_differences():
    draw = np.random.default_rng(0)
    before, after = draw.random(200) < 0.3, draw.random(200) < 0.6
    gain = gain_interval(score(*before.astype(float)), score(*after.astype(float)))
    differences = after.astype(float) - before
    half = 1.96 * differences.std(ddof=1) / np.sqrt(200)
    assert gain.value == pytest.approx(differences.mean())
    assert gain.low == pytest.approx(differences.mean() - half, abs=0.012)
    assert gain.high == pytest.approx(differences.mean() + half, abs=0.012)


def test_gain_of_nothing_is_nothing_and_the_seed_decides():
    same = score(1.0, 0.0, 1.0)
    assert (gain_interval(same, same).low, gain_interval(same, same).high) == (0.0, 0.0)
    before, after = score(*[0.0] * 30), score(*[1.0, 0.0] * 15)
    assert gain_interval(before, after, seed=1) == gain_interval(before, after, seed=1)


def test_gain_needs_the_same_tasks_and_mode():
    with pytest.raises(ValueError, match="same tasks"):
        gain_interval(score(1.0), score(1.0, 1.0))
    with pytest.raises(ValueError, match="same mode"):
        gain_interval(score(1.0), score(1.0, mode="greedy"))
    with pytest.raises(ValueError, match="no tasks"):
        gain_interval(score(), score())
