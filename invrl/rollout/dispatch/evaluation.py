"""Held-out accuracy, measured through the same endpoint and workers that training uses.

`evaluate` runs each task of a set in one mode: "sampled" at temperature 1, or "greedy".
The statistics below it are pure functions. Invariants: a rollout that fails scores 0
and is counted by its reason; a rollout that fails for a reason of ours (a dead worker,
an engine) is retried first; an `Evaluation` survives a round trip through
JSON unchanged.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

import numpy as np

from invrl.rollout.config import EvalMode, RolloutConfig
from invrl.rollout.dispatch.dispatcher import assignments
from invrl.rollout.dispatch.intervals import EXACT_REWARD, Interval, bootstrap_interval
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_pool import WorkerPool
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome
from invrl.types.sessions import Sampling
from invrl.types.tasks import Task

_Z95 = NormalDist().inv_cdf(0.975)
_OUR_FAILURES = frozenset({FailureReason.WORKER_DIED, FailureReason.ENGINE})
_MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScore:
    """One set in one mode: the reward of each sample of each task, in the tasks'
    order."""

    set_name: str = ""
    mode: EvalMode
    task_ids: tuple[str, ...]
    rewards: tuple[tuple[float, ...], ...]
    failures: Mapping[str, int]
    """Number of failed rollouts by reason. Each has a reward of 0 in `rewards`."""
    failure_detail: str = ""
    oldest_version: int | None = None
    """Oldest version of the weights that sampled a token of these rollouts. None if
    there is no token, or if invrl did not record it yet."""
    newest_version: int | None = None

    @property
    def name(self) -> str:
        if self.set_name:
            return f"{self.set_name}/{self.mode}"
        return self.mode

    @property
    def samples(self) -> int:
        return sum(len(task_rewards) for task_rewards in self.rewards)

    @property
    def mean_reward(self) -> float:
        if not self.samples:
            return 0.0
        return sum(sum(task_rewards) for task_rewards in self.rewards) / self.samples

    @property
    def accuracy(self) -> Interval:
        """Share of samples with a reward of at least `EXACT_REWARD`. The interval
        assumes independent samples, which holds with one sample per task."""
        exact = sum(_count_exact(task_rewards) for task_rewards in self.rewards)
        return wilson_interval(exact, self.samples)

    @property
    def pass_at_k(self) -> Mapping[int, Interval]:
        """Probability that one of k = 1, 2, 4, ... samples of a task is exact: the mean
        over tasks, with a bootstrap interval. k goes up to the smallest number of
        samples of a task."""
        min_samples = min(
            (len(task_rewards) for task_rewards in self.rewards), default=0
        )
        intervals: dict[int, Interval] = {}
        k = 1
        while k <= min_samples:
            of_tasks_K = [
                pass_at_k(len(rewards), _count_exact(rewards), k)
                for rewards in self.rewards
            ]
            intervals[k] = bootstrap_interval(np.array(of_tasks_K))
            k *= 2
        return intervals

    @property
    def measures(self) -> Mapping[str, Interval]:
        """Every measure by name. The interval of the mean reward is a bootstrap over
        tasks."""
        mean_reward_K = np.array(
            [np.mean(task_rewards) for task_rewards in self.rewards]
        )
        measures = {
            "reward_mean": bootstrap_interval(mean_reward_K),
            "accuracy": self.accuracy,
        }
        for k, interval in self.pass_at_k.items():
            measures[f"pass_at_{k}"] = interval
        return measures

    def values(self) -> dict[str, float]:
        """Return the measures with the bounds of their intervals, as flat metric
        values."""
        numbers = {
            "samples": float(self.samples),
            "failed": float(sum(self.failures.values())),
        }
        if self.oldest_version is not None and self.newest_version is not None:
            numbers["oldest_version"] = float(self.oldest_version)
            numbers["newest_version"] = float(self.newest_version)
        for name, interval in self.measures.items():
            numbers[name] = interval.value
            numbers[f"{name}_low"] = interval.low
            numbers[f"{name}_high"] = interval.high
        return {f"eval/{self.name}/{name}": number for name, number in numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All sets in all modes. Where rollouts are trained on meanwhile, later tasks may
    have been answered by a newer version of the weights than the first ones."""

    scores: Mapping[str, EvalScore]
    """Scores by `EvalScore.name`: "sampled", or "<set>/sampled"."""

    def values(self) -> dict[str, float]:
        """Return all scores as flat metric values."""
        values: dict[str, float] = {}
        for score in self.scores.values():
            values |= score.values()
        return values


class Watch(Protocol):
    """Observer of the rollouts of a task, called when they begin and end, with the id
    of their group. An exception raised here ends the evaluation."""

    def began(self, group_id: str) -> None: ...
    def ended(self, group_id: str, outcomes: list[Outcome]) -> None: ...


async def evaluate(
    tasks: Sequence[Task],
    config: RolloutConfig,
    *,
    mode: EvalMode,
    sessions: SessionClient,
    pool: WorkerPool,
    group_form: bool,
    label: str,
    set_name: str = "",
    watch: Watch | None = None,
) -> EvalScore:
    """Runs every task `eval.samples_per_task` times (greedy: once). `label` makes the
    group ids of this evaluation unique. Raises the exceptions of the pool, the gateway
    and `watch`; a rollout that fails raises nothing."""
    if mode == "greedy":
        samples = 1
        temperature = 0.0
    else:
        samples = config.eval.samples_per_task
        temperature = 1.0
    sampling = Sampling(temperature=temperature, max_new_tokens=config.max_new_tokens)
    task_slots = asyncio.Semaphore(max(1, config.first_concurrency // samples))

    async def run_lease(lease: GroupLease) -> list[Outcome]:
        group_sessions = await sessions.open(lease, purpose="eval", sampling=sampling)
        calls = assignments(lease, group_sessions, group_form=group_form)
        outcomes: list[Outcome] = []
        for call_outcomes in await asyncio.gather(*(pool.run(call) for call in calls)):
            outcomes.extend(call_outcomes)
        return outcomes

    async def run_task(task: Task) -> list[Outcome]:
        members = tuple(GroupMember(index=index, attempt=0) for index in range(samples))
        lease = GroupLease(
            group_id=f"eval/{label}/{mode}/{task.id}", task=task, members=members
        )
        async with task_slots:
            if watch is not None:
                watch.began(lease.group_id)
            outcomes = await _run_with_attempts(run_lease, lease)
            if watch is not None:
                watch.ended(lease.group_id, outcomes)
        return outcomes

    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run_task(task)) for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    task_ids = tuple(task.id for task in tasks)
    return _score(set_name, mode, task_ids, [run.result() for run in runs])


async def _run_with_attempts(
    run_lease: Callable[[GroupLease], Awaitable[list[Outcome]]], lease: GroupLease
) -> list[Outcome]:
    """Run the rollouts of a task, and those again that failed through no fault of the
    policy."""
    outcomes = await run_lease(lease)
    for attempt in range(1, _MAX_ATTEMPTS):
        indices = [
            index for index, outcome in enumerate(outcomes) if _is_our_failure(outcome)
        ]
        if not indices:
            break
        members = tuple(GroupMember(index=index, attempt=attempt) for index in indices)
        replacements = await run_lease(replace(lease, members=members))
        for index, outcome in zip(indices, replacements, strict=True):
            outcomes[index] = outcome
    return outcomes


def _is_our_failure(outcome: Outcome) -> bool:
    return isinstance(outcome, FailedRollout) and outcome.reason in _OUR_FAILURES


def _score(
    set_name: str,
    mode: EvalMode,
    task_ids: tuple[str, ...],
    outcomes_K: Sequence[Sequence[Outcome]],
) -> EvalScore:
    """Score the outcomes of each task. A failed rollout has a reward of 0."""
    rewards_K: list[tuple[float, ...]] = []
    failures: Counter[str] = Counter()
    failure_detail = ""
    versions: set[int] = set()
    for outcomes in outcomes_K:
        task_rewards: list[float] = []
        for outcome in outcomes:
            if isinstance(outcome, FailedRollout):
                summary = outcome.partial
                task_rewards.append(0.0)
                failures[outcome.reason.value] += 1
                failure_detail = outcome.detail
            else:
                summary = outcome
                task_rewards.append(outcome.reward)
            if summary is not None:
                versions |= {summary.oldest_version, summary.newest_version}
        rewards_K.append(tuple(task_rewards))
    return EvalScore(
        set_name=set_name,
        mode=mode,
        task_ids=task_ids,
        rewards=tuple(rewards_K),
        failures=dict(failures),
        failure_detail=failure_detail,
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
    )


def failure_note(score: EvalScore) -> str:
    """Say how many rollouts failed and why, followed by the end of the last failure if
    all did."""
    failed = sum(score.failures.values())
    reasons = ", ".join(
        f"{count} {reason}" for reason, count in sorted(score.failures.items())
    )
    text = f"{score.name}: {failed} of {score.samples} rollouts failed and score 0 ({reasons})"
    if failed < score.samples:
        return text
    last_lines = score.failure_detail.strip().splitlines()[-6:]
    indented = "\n".join(f"    {line}" for line in last_lines)
    return f"{text}; the last one says:\n{indented}"


def wilson_interval(successes: int, n: int) -> Interval:
    """Return a proportion with its 95 % score interval (Wilson 1927, JASA 22:209). For
    n = 0 it is 0 to 1."""
    if n == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    share = successes / n
    z2 = _Z95**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(
        value=share, low=max(0.0, center - half), high=min(1.0, center + half)
    )


def pass_at_k(n: int, exact: int, k: int) -> float:
    """Return the probability that k of a task's n samples, drawn without replacement,
    include one of its `exact` ones: the unbiased estimator of Chen et al. 2021
    (arXiv:2107.03374, equation 1)."""
    return 1.0 - math.comb(n - exact, k) / math.comb(n, k)


def gain_interval(before: EvalScore, after: EvalScore, *, seed: int = 0) -> Interval:
    """Return the gain in accuracy with its 95 % interval: the paired bootstrap over
    tasks. Raises ValueError unless both scores have the same name and the same tasks in
    the same order."""
    if before.task_ids != after.task_ids or before.name != after.name:
        raise ValueError(
            "a paired gain needs the same tasks in the same mode, before and after"
        )
    return bootstrap_interval(_task_accuracy(after) - _task_accuracy(before), seed=seed)


def _task_accuracy(score: EvalScore) -> np.ndarray:
    """Return the share of exact samples per task: float64 [K]."""
    return np.array(
        [
            np.mean([reward >= EXACT_REWARD for reward in rewards])
            for rewards in score.rewards
        ]
    )


def _count_exact(rewards: Sequence[float]) -> int:
    return sum(reward >= EXACT_REWARD for reward in rewards)
