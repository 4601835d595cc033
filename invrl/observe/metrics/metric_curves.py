"""Curves of a run's metrics: the steps and values of one name. Pure."""

from collections.abc import Sequence

from invrl.store.metrics_file import MetricsRow

REWARD = "rollout/reward_mean"
REWARD_MIN = "rollout/reward_min"
REWARD_MAX = "rollout/reward_max"
EVAL_PREFIX = "eval/"
EVAL_SUFFIX = "/accuracy"
"""Held-out results: `eval/[<set>/]<mode>/accuracy`, with the 95 % interval in `..._low`
and `..._high`."""


def curve(rows: Sequence[MetricsRow], name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric. If a step has two rows, the later one
    counts."""
    points: dict[int, float] = {}
    for row in rows:
        value = row.get(name)
        if value is not None:
            points[int(row["step"] or 0)] = value
    return list(points), list(points.values())


def eval_names(rows: Sequence[MetricsRow]) -> list[str]:
    """Return the names of the held-out accuracies, sorted."""
    names: set[str] = set()
    for row in rows:
        for name in row:
            if name.startswith(EVAL_PREFIX) and name.endswith(EVAL_SUFFIX):
                names.add(name)
    return sorted(names)
