"""Gain in accuracy on each held-out set, from the first evaluation to the last, with
its 95 % interval over the same tasks."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from invrl.rollout.dispatch.intervals import EXACT_REWARD, bootstrap_interval

Rewards = Mapping[tuple[str, str], Mapping[str, Sequence[float | None]]]
"""Rewards of the samples, by task and name of the evaluation, then by step."""
Row = dict[str, Any]


def held_out_gains(scores: Iterable[Row], rewards: Rewards) -> list[Row]:
    """Return one row for each evaluation with an accuracy. `scores`: in the order of
    their steps. The gain is null after one evaluation; its interval is null if the
    first and the last one had different tasks."""
    scores_by_name: dict[str, list[Row]] = defaultdict(list)
    for score in scores:
        if score["accuracy"] is not None:
            scores_by_name[score["name"]].append(score)
    return [
        _gain(name, named[0], named[-1], rewards)
        for name, named in sorted(scores_by_name.items())
    ]


def _gain(name: str, first: Row, last: Row, rewards: Rewards) -> Row:
    before = _accuracies(name, first["step"], rewards)
    after = _accuracies(name, last["step"], rewards)
    row: Row = {
        "name": name,
        "first": first,
        "last": last,
        "gain": None,
        "gain_low": None,
        "gain_high": None,
        "tasks": len(after) or None,
    }
    if first["step"] == last["step"]:
        return row
    row["gain"] = last["accuracy"] - first["accuracy"]
    if before and before.keys() == after.keys():
        changes_K = np.array([after[task] - before[task] for task in before])
        interval = bootstrap_interval(changes_K)
        row["gain_low"] = interval.low
        row["gain_high"] = interval.high
    return row


def _accuracies(name: str, step: int, rewards: Rewards) -> dict[str, float]:
    return {
        task: fmean((reward or 0.0) >= EXACT_REWARD for reward in by_step[str(step)])
        for (task, evaluation), by_step in rewards.items()
        if evaluation == name and str(step) in by_step
    }
