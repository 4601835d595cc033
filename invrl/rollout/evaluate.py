"""Held-out accuracy, measured through the same endpoint and workers that training uses.

`evaluate` runs each task in one mode ("sampled" at temperature 1, or "greedy"); the statistics below
it are pure. Invariant: a rollout that fails scores 0 and is counted by its reason; one that fails
for a reason of ours (a worker that died, an engine) is tried again first. Called by
`rollout_handle.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np

from invrl.rollout.dispatcher import Pool, SessionOpener, assignments
from invrl.types import (
    FailedRollout,
    FailureReason,
    GroupLease,
    GroupMember,
    RolloutSummary,
    Sampling,
    Task,
)

EvalMode = Literal["sampled", "greedy"]
EXACT_REWARD = 1.0
_Z95 = NormalDist().inv_cdf(0.975)
_RESAMPLES = 10_000
_TRY_AGAIN = frozenset({FailureReason.WORKER_DIED, FailureReason.ENGINE})
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScore:
    """One evaluation in one mode: the reward of each sample of each task, in the tasks' order."""

    mode: EvalMode
    task_ids: tuple[str, ...]
    rewards: tuple[tuple[float, ...], ...]
    failures: Mapping[str, int]
    """Rollouts that failed, by reason; each is a reward of 0 above."""

    @property
    def samples(self) -> int:
        return sum(len(of_task) for of_task in self.rewards)

    @property
    def mean_reward(self) -> float:
        return sum(sum(of_task) for of_task in self.rewards) / self.samples if self.samples else 0.0

    @property
    def accuracy(self) -> Interval:
        """Share of samples with a reward of at least `EXACT_REWARD`. The interval takes samples for
        independent, which they are with one per task."""
        exact = sum(reward >= EXACT_REWARD for of_task in self.rewards for reward in of_task)
        return wilson_interval(exact, self.samples)

    def values(self) -> dict[str, float]:
        """Flat metric values."""
        accuracy = self.accuracy
        return {
            f"eval/{self.mode}/reward_mean": self.mean_reward,
            f"eval/{self.mode}/accuracy": accuracy.value,
            f"eval/{self.mode}/accuracy_low": accuracy.low,
            f"eval/{self.mode}/accuracy_high": accuracy.high,
            f"eval/{self.mode}/samples": float(self.samples),
            f"eval/{self.mode}/failed": float(sum(self.failures.values())),
        }


async def evaluate(
    tasks: Sequence[Task],
    *,
    mode: EvalMode,
    samples_per_task: int,
    max_new_tokens: int,
    sessions: SessionOpener,
    pool: Pool,
    concurrency: int,
    group_form: bool,
    label: str,
) -> EvalScore:
    """Runs every task `samples_per_task` times (greedy: once). `label` makes the group ids of this
    evaluation its own. Raises what the pool and the gateway raise; never because of a rollout."""
    samples = 1 if mode == "greedy" else samples_per_task
    sampling = Sampling(temperature=0.0 if mode == "greedy" else 1.0, max_new_tokens=max_new_tokens)
    room = asyncio.Semaphore(max(1, concurrency // samples))

    async def run_lease(lease: GroupLease) -> list[RolloutSummary | FailedRollout]:
        opened = await sessions.open(lease, purpose="eval", sampling=sampling)
        calls = assignments(lease, opened, group_form=group_form)
        ended = await asyncio.gather(*(pool.run(call) for call in calls))
        return [outcome for of_call in ended for outcome in of_call]

    async def run_task(task: Task) -> list[RolloutSummary | FailedRollout]:
        members = tuple(GroupMember(index=index, attempt=0) for index in range(samples))
        lease = GroupLease(group_id=f"eval/{label}/{mode}/{task.id}", task=task, members=members)
        async with room:
            outcomes = await run_lease(lease)
            for attempt in range(1, _ATTEMPTS):
                again = [at for at, outcome in enumerate(outcomes) if _not_its_fault(outcome)]
                if not again:
                    break
                members = tuple(GroupMember(index=at, attempt=attempt) for at in again)
                for at, outcome in zip(again, await run_lease(replace(lease, members=members)), strict=True):
                    outcomes[at] = outcome
        return outcomes

    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run_task(task)) for task in tasks]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    ended = [run.result() for run in runs]
    failures = Counter(o.reason.value for of_task in ended for o in of_task if isinstance(o, FailedRollout))
    return EvalScore(
        mode=mode,
        task_ids=tuple(task.id for task in tasks),
        rewards=tuple(
            tuple(o.reward if isinstance(o, RolloutSummary) else 0.0 for o in of_task) for of_task in ended
        ),
        failures=dict(failures),
    )


def wilson_interval(successes: int, n: int) -> Interval:
    """A proportion with its 95 % score interval (Wilson 1927, JASA 22:209). n = 0: nothing is known."""
    if n == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    share, z2 = successes / n, _Z95**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(value=share, low=max(0.0, center - half), high=min(1.0, center + half))


def gain_interval(before: EvalScore, after: EvalScore, *, seed: int = 0) -> Interval:
    """Gain in accuracy with its 95 % interval: the paired percentile bootstrap over tasks (Efron and
    Tibshirani 1993, An Introduction to the Bootstrap, chapter 13), 10,000 resamples. Raises ValueError
    unless both measured the same tasks in the same order."""
    if before.task_ids != after.task_ids or before.mode != after.mode:
        raise ValueError("a paired gain needs the same tasks in the same mode, before and after")
    gains_K = _task_accuracy(after) - _task_accuracy(before)
    if not len(gains_K):
        raise ValueError("no tasks were evaluated")
    drawn = np.random.default_rng(seed).integers(0, len(gains_K), (_RESAMPLES, len(gains_K)))
    low, high = np.quantile(gains_K[drawn].mean(axis=1), [0.025, 0.975])
    return Interval(value=float(gains_K.mean()), low=float(low), high=float(high))


def _task_accuracy(score: EvalScore) -> np.ndarray:
    """Share of exact samples per task: float64 [K]."""
    return np.array([np.mean([reward >= EXACT_REWARD for reward in of_task]) for of_task in score.rewards])


def _not_its_fault(outcome: RolloutSummary | FailedRollout) -> bool:
    return isinstance(outcome, FailedRollout) and outcome.reason in _TRY_AGAIN
