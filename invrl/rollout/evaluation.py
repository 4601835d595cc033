"""Held-out accuracy, measured through the same endpoint and workers that training uses.

`evaluate` runs each task of a set in one mode ("sampled" at temperature 1, or "greedy"); the statistics
below it are pure. Invariants: a rollout that fails scores 0 and is counted by its reason; one that fails
for a reason of ours (a worker that died, an engine) is tried again first; an `Evaluation` is read back
from JSON as it was."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

import numpy as np

from invrl.rollout.config import EvalMode, RolloutConfig
from invrl.rollout.dispatcher import assignments
from invrl.rollout.session_client import SessionClient
from invrl.rollout.worker_pool import WorkerPool
from invrl.types import FailedRollout, FailureReason, GroupLease, GroupMember, Outcome, Sampling, Task

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
    """One set in one mode: the reward of each sample of each task, in the tasks' order."""

    set_name: str = ""
    mode: EvalMode
    task_ids: tuple[str, ...]
    rewards: tuple[tuple[float, ...], ...]
    failures: Mapping[str, int]
    """Rollouts that failed, by reason; each is a reward of 0 above."""
    failure_detail: str = ""
    """What is told of the last of them."""

    @property
    def name(self) -> str:
        return f"{self.set_name}/{self.mode}" if self.set_name else self.mode

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

    @property
    def pass_at_k(self) -> Mapping[int, Interval]:
        """Chance that one of k = 1, 2, 4, ... samples of a task is exact: mean and bootstrap over tasks."""
        counts = [(len(r), sum(reward >= EXACT_REWARD for reward in r)) for r in self.rewards]
        ks = [2**power for power in range(min((n for n, _ in counts), default=0).bit_length())]
        return {k: bootstrap_interval(np.array([pass_at_k(n, c, k) for n, c in counts])) for k in ks}

    @property
    def measures(self) -> Mapping[str, Interval]:
        """By name; the mean reward's interval is a bootstrap over tasks."""
        reward = bootstrap_interval(np.array([np.mean(of_task) for of_task in self.rewards]))
        passed = {f"pass_at_{k}": share for k, share in self.pass_at_k.items()}
        return {"reward_mean": reward, "accuracy": self.accuracy, **passed}

    def values(self) -> dict[str, float]:
        numbers = {"samples": float(self.samples), "failed": float(sum(self.failures.values()))}
        for name, found in self.measures.items():
            numbers |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        return {f"eval/{self.name}/{name}": number for name, number in numbers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Every set in every mode, under one version of the weights."""

    scores: Mapping[str, EvalScore]
    """By `EvalScore.name`: "sampled", or "<set>/sampled"."""

    def values(self) -> dict[str, float]:
        return {name: value for score in self.scores.values() for name, value in score.values().items()}


class Watch(Protocol):
    """Told of the rollouts of each task, by the id of their group. What it raises ends the evaluation."""

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
    """Runs every task `eval_samples_per_task` times (greedy: once). `label` makes the group ids of this
    evaluation its own. Raises what the pool, the gateway and `watch` raise; never because of one rollout."""
    samples = 1 if mode == "greedy" else config.eval_samples_per_task
    sampling = Sampling(temperature=0.0 if mode == "greedy" else 1.0, max_new_tokens=config.max_new_tokens)
    room = asyncio.Semaphore(max(1, config.rollout_concurrency // samples))

    async def run_lease(lease: GroupLease) -> list[Outcome]:
        opened = await sessions.open(lease, purpose="eval", sampling=sampling)
        calls = assignments(lease, opened, group_form=group_form)
        ended = await asyncio.gather(*(pool.run(call) for call in calls))
        return [outcome for of_call in ended for outcome in of_call]

    async def run_task(task: Task) -> list[Outcome]:
        members = tuple(GroupMember(index=index, attempt=0) for index in range(samples))
        lease = GroupLease(group_id=f"eval/{label}/{mode}/{task.id}", task=task, members=members)
        async with room:
            if watch is not None:
                watch.began(lease.group_id)
            outcomes = await run_lease(lease)
            for attempt in range(1, _ATTEMPTS):
                failed = [(at, one) for at, one in enumerate(outcomes) if isinstance(one, FailedRollout)]
                if not (again := [at for at, one in failed if one.reason in _TRY_AGAIN]):
                    break
                members = tuple(GroupMember(index=at, attempt=attempt) for at in again)
                for at, outcome in zip(again, await run_lease(replace(lease, members=members)), strict=True):
                    outcomes[at] = outcome
            if watch is not None:
                watch.ended(lease.group_id, outcomes)
        return outcomes

    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(run_task(task)) for task in tasks]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    ended = [run.result() for run in runs]
    failures = Counter(o.reason.value for of_task in ended for o in of_task if isinstance(o, FailedRollout))
    details = [o.detail for of_task in ended for o in of_task if isinstance(o, FailedRollout)]
    rewards = tuple(tuple(0.0 if isinstance(o, FailedRollout) else o.reward for o in each) for each in ended)
    ids = tuple(task.id for task in tasks)
    return EvalScore(
        set_name=set_name,
        mode=mode,
        task_ids=ids,
        rewards=rewards,
        failures=dict(failures),
        failure_detail=details[-1] if details else "",
    )


def failure_note(score: EvalScore) -> str:
    """How many rollouts failed, why, and where all of them did, the end of what the last one says."""
    failed = sum(score.failures.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(score.failures.items()))
    text = f"{score.name}: {failed} of {score.samples} rollouts failed and score 0 ({reasons})"
    if failed < score.samples:
        return text
    end = "\n".join(f"    {line}" for line in score.failure_detail.strip().splitlines()[-6:])
    return f"{text}; the last one says:\n{end}"


def wilson_interval(successes: int, n: int) -> Interval:
    """A proportion with its 95 % score interval (Wilson 1927, JASA 22:209). n = 0: nothing is known."""
    if n == 0:
        return Interval(value=0.0, low=0.0, high=1.0)
    share, z2 = successes / n, _Z95**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return Interval(value=share, low=max(0.0, center - half), high=min(1.0, center + half))


def pass_at_k(n: int, exact: int, k: int) -> float:
    """Chance that k of a task's n samples, drawn without replacement, hold one of its `exact` ones: the
    unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1)."""
    return 1.0 - math.comb(n - exact, k) / math.comb(n, k)


def bootstrap_interval(of_tasks_K: np.ndarray, *, seed: int = 0) -> Interval:
    """The mean with its 95 % interval: the percentile bootstrap over tasks (Efron and Tibshirani 1993, An
    Introduction to the Bootstrap, chapter 13), 10,000 resamples. A resample is drawn as how often each
    distinct value comes up. Raises ValueError without tasks."""
    if not len(of_tasks_K):
        raise ValueError("no tasks were evaluated")
    values, counts = np.unique(of_tasks_K, return_counts=True)
    rng, shares = np.random.default_rng(seed), counts / counts.sum()
    # In parts: as many values as tasks would be gigabytes.
    sums = [rng.multinomial(len(of_tasks_K), shares, _RESAMPLES // 100) @ values for _ in range(100)]
    low, high = np.quantile(np.concatenate(sums) / len(of_tasks_K), [0.025, 0.975])
    return Interval(value=float(of_tasks_K.mean()), low=float(low), high=float(high))


def gain_interval(before: EvalScore, after: EvalScore, *, seed: int = 0) -> Interval:
    """Gain in accuracy with its 95 % interval: the paired bootstrap over tasks. Raises ValueError unless
    both measured the same tasks in the same order."""
    if before.task_ids != after.task_ids or before.name != after.name:
        raise ValueError("a paired gain needs the same tasks in the same mode, before and after")
    return bootstrap_interval(_task_accuracy(after) - _task_accuracy(before), seed=seed)


def _task_accuracy(score: EvalScore) -> np.ndarray:
    """Share of exact samples per task: float64 [K]."""
    return np.array([np.mean([reward >= EXACT_REWARD for reward in of_task]) for of_task in score.rewards])
