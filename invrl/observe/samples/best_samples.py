"""Selects and orders the rollouts of a run that are candidates for training on them
again. Pure.

Only training rollouts that finished count. Epochs of one task are one task
(`first_ids`), so its best rollout may come from any of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from invrl.observe.samples.samples import Sample, first_ids


class NoCandidate(StrEnum):
    """Reason that a rollout is not a candidate."""

    NOT_TRAINING = "held out or served, not of training"
    FAILED = "it failed"
    LOST = "a later incarnation of the run resumed from before it"
    OTHER_STEP = "trained in none of these steps"
    LOW_REWARD = "its reward is too low"
    ALONE = "no other rollout of its group finished"
    EQUAL_REWARDS = "all rewards of its group are equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions for a candidate. `steps`: first and last one, both included; None:
    any, and also rollouts that no step trained."""

    min_reward: float | None = None
    steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Candidates by task, or groups of them, in the order in which to take them."""

    by_task: dict[str, list[list[Sample]]]
    left_out: Counter[str]
    """Rollouts that are not candidates, by reason."""


def candidates_for_rows(samples: Sequence[Sample], wanted: Wanted) -> Candidates:
    """Return candidates in which each list within a task is one rollout. The highest
    reward comes first; of equal ones, that of the newest weights."""
    left_out: Counter[str] = Counter()
    by_task: dict[str, list[list[Sample]]] = {}
    for task_id, of_task in _finished_by_task(samples, wanted, left_out).items():
        kept: list[Sample] = []
        for sample in of_task:
            if _is_too_low(sample, wanted):
                left_out[NoCandidate.LOW_REWARD] += 1
            else:
                kept.append(sample)
        if kept:
            by_task[task_id] = [[sample] for sample in best_first(kept)]
    return Candidates(by_task=by_task, left_out=left_out)


def candidates_for_pairs(samples: Sequence[Sample], wanted: Wanted) -> Candidates:
    """Return candidates in which each list within a task is a group with different
    rewards, the best rollout first and the worst last. The group with the largest
    difference between best and worst reward comes first; of equal ones, that of the
    newest weights. `wanted.min_reward` applies to the best rollout of a group."""
    left_out: Counter[str] = Counter()
    by_task: dict[str, list[list[Sample]]] = {}
    for task_id, of_task in _finished_by_task(samples, wanted, left_out).items():
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in of_task:
            groups[sample.identity.group_id].append(sample)
        kept: list[list[Sample]] = []
        for group in groups.values():
            ordered = best_first(group)
            reason = _no_pair(ordered, wanted)
            if reason is None:
                kept.append(ordered)
            else:
                left_out[reason] += len(ordered)
        if kept:
            kept.sort(
                key=lambda group: (_difference(group), _newest_version(group)),
                reverse=True,
            )
            by_task[task_id] = kept
    return Candidates(by_task=by_task, left_out=left_out)


def best_first(samples: Sequence[Sample]) -> list[Sample]:
    """Sort by reward, the highest first; of equal ones, that of the newest weights
    comes first."""
    return _newest_first(samples, lambda sample: -finished_reward(sample))


def worst_first(samples: Sequence[Sample]) -> list[Sample]:
    """Sort by reward, the lowest first; of equal ones, that of the newest weights comes
    first."""
    return _newest_first(samples, finished_reward)


def _newest_first(
    samples: Sequence[Sample], order: Callable[[Sample], float]
) -> list[Sample]:
    return sorted(
        samples,
        key=lambda sample: (
            order(sample),
            -(sample.newest_version or 0),
            sample.identity.index,
        ),
    )


def finished_reward(sample: Sample) -> float:
    """Return the reward of a finished rollout, which always has one."""
    assert sample.reward is not None, (
        f"rollout {sample.identity.session_id} has no reward"
    )
    return sample.reward


def _finished_by_task(
    samples: Sequence[Sample], wanted: Wanted, left_out: Counter[str]
) -> dict[str, list[Sample]]:
    """Group finished rollouts by the task's first id. The others are counted in
    `left_out`."""
    names = first_ids(sample.identity.task_id for sample in samples)
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        reason = _no_candidate(sample, wanted)
        if reason is None:
            by_task[names[sample.identity.task_id]].append(sample)
        else:
            left_out[reason] += 1
    return by_task


def _no_candidate(sample: Sample, wanted: Wanted) -> NoCandidate | None:
    if sample.purpose != "train":
        return NoCandidate.NOT_TRAINING
    if sample.failure is not None or sample.reward is None:
        return NoCandidate.FAILED
    if sample.state == "lost":
        return NoCandidate.LOST
    if wanted.steps is not None:
        first, last = wanted.steps
        if sample.step is None or not first <= sample.step <= last:
            return NoCandidate.OTHER_STEP
    return None


def _no_pair(group: Sequence[Sample], wanted: Wanted) -> NoCandidate | None:
    if len(group) == 1:
        return NoCandidate.ALONE
    if not _difference(group):
        return NoCandidate.EQUAL_REWARDS
    if _is_too_low(group[0], wanted):
        return NoCandidate.LOW_REWARD
    return None


def _is_too_low(sample: Sample, wanted: Wanted) -> bool:
    return wanted.min_reward is not None and finished_reward(sample) < wanted.min_reward


def _difference(group: Sequence[Sample]) -> float:
    """Return the difference between the best and the worst reward. `group`: the best
    first."""
    return finished_reward(group[0]) - finished_reward(group[-1])


def _newest_version(group: Sequence[Sample]) -> int:
    return max(sample.newest_version or 0 for sample in group)
