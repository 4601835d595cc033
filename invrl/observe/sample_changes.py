"""What training changed: the tasks whose rewards or replies differ between the first
and the last time that they were run."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from invrl.observe.samples import Sample
from invrl.observe.transcript import read_transcript
from invrl.store.run_store import RunStore

_MAX_COMPARED_CHARACTERS = 500
"""Of each text: difflib's time grows with the product of their lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One task at two times of a run. Each time is shown by one of its rollouts."""

    task_id: str
    evaluation: str
    """As in `Sample`; "" for training rollouts."""
    reward_before: float
    """Mean of the rollouts at that time."""
    reward_after: float
    before: Sample
    after: Sample
    likeness: float
    """Of the replies of the two samples: 0 nothing in common, 1 equal (difflib's
    ratio)."""

    @property
    def gain(self) -> float:
        return self.reward_after - self.reward_before


def changes(samples: Sequence[Sample], store: RunStore) -> list[Change]:
    """The tasks that changed between their first and their last time. The largest
    change comes first: the one whose mean reward moved most, and among equal ones the
    one whose replies are least alike.

    A time of a held-out task is an evaluation; only the same set and mode are compared.
    A time of a training task is a group of it, whatever became of the group, also in a
    later epoch. The two times must have different weights. Left out are tasks without
    two such times, and tasks with equal rewards and replies."""
    names = first_ids(sample.identity.task_id for sample in samples)
    by_task: dict[tuple[str, str], dict[object, list[Sample]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for sample in samples:
        if (
            sample.reward is None
            or sample.newest_version is None
            or sample.purpose == "serve"
        ):
            continue
        time: object = sample.identity.group_id
        if sample.purpose == "eval":
            time = sample.step
        by_task[names[sample.identity.task_id], sample.evaluation][time].append(sample)
    changed: list[Change] = []
    for (task_id, evaluation), times in by_task.items():
        groups = sorted(times.values(), key=_order)
        first = groups[0]
        last = groups[-1]
        if _newest_version(first) >= _newest_version(last):
            continue
        change = _compare(task_id, evaluation, first, last, store)
        if change.gain or change.likeness < 1.0:
            changed.append(change)
    return sorted(changed, key=lambda change: (-abs(change.gain), change.likeness))


def first_ids(task_ids: Iterable[str]) -> dict[str, str]:
    """By task id: the id that the task had when it came first. A task that comes back,
    in a later epoch for example, has a number behind its id (`10`, `10@1`, `10@2`)."""
    ids = set(task_ids)
    first: dict[str, str] = {}
    for task_id in ids:
        base, _, number = task_id.rpartition("@")
        first[task_id] = task_id
        if base in ids and number.isdecimal():
            first[task_id] = base
    return first


def _order(group: Sequence[Sample]) -> tuple[int, float]:
    """By the newest weights of a group, then by the time at which it began."""
    return _newest_version(group), min(sample.opened_at for sample in group)


def _newest_version(group: Sequence[Sample]) -> int:
    return max(sample.newest_version or 0 for sample in group)


def _compare(
    task_id: str,
    evaluation: str,
    first: Sequence[Sample],
    last: Sequence[Sample],
    store: RunStore,
) -> Change:
    before = _typical_sample(first)
    after = _typical_sample(last)
    replies_before = read_transcript(store, before.identity.session_id).replies
    replies_after = read_transcript(store, after.identity.session_id).replies
    return Change(
        task_id=task_id,
        evaluation=evaluation,
        reward_before=_mean_reward(first),
        reward_after=_mean_reward(last),
        before=before,
        after=after,
        likeness=likeness(replies_before, replies_after),
    )


def _mean_reward(group: Sequence[Sample]) -> float:
    return fmean(sample.reward or 0.0 for sample in group)


def _typical_sample(group: Sequence[Sample]) -> Sample:
    """The sample whose reward is nearest to the mean of the group; the first of
    several."""
    mean = _mean_reward(group)
    return min(
        group,
        key=lambda sample: (abs((sample.reward or 0.0) - mean), sample.identity.index),
    )


def likeness(first: str, second: str) -> float:
    """0 for texts with nothing in common, 1 for equal ones; judged by their
    beginnings."""
    if first == second:
        return 1.0
    first_part = first[:_MAX_COMPARED_CHARACTERS]
    second_part = second[:_MAX_COMPARED_CHARACTERS]
    matcher = difflib.SequenceMatcher(None, first_part, second_part, autojunk=False)
    return min(matcher.ratio(), 1.0 - 1e-9)
