"""Scores of a step's weights from the run's metrics, and the checkpoints that stay
because of them.

The score is the held-out accuracy of the step's weights (the mean over sets and modes),
the mean training reward of the steps up to it, or the held-out loss, where lower is
better. A checkpoint is judged when a later one is saved. If the evaluation after its
step still runs then, it is judged by the save after that evaluation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

from invrl.store.metrics_file import MetricsRow, read_metrics

ScoreKind = Literal["held_out", "reward", "held_out_loss"]

_ACCURACY_PREFIX = "eval/"
_ACCURACY_SUFFIX = "/accuracy"
HELD_OUT_LOSS = "eval/loss"
_REWARD = "rollout/reward_mean"
_REWARD_STEPS = 8
"""Steps whose rewards are averaged, because one batch says little."""


def kept_steps(
    steps: Iterable[int],
    *,
    newest: int,
    best: int = 0,
    scores: Mapping[int, float] | None = None,
    in_evaluation: int | None = None,
) -> set[int]:
    """Return the saved steps that stay: the `newest`, and of the older ones the `best`
    by score, later ones first if scores are equal. With `newest` 0 all stay. A step
    without a score is not among the best. The step `in_evaluation`, whose score is not
    known yet, stays if any may stay for its score."""
    ordered = sorted(steps)
    if not newest:
        return set(ordered)
    known = scores or {}
    older = [step for step in ordered[:-newest] if step in known]
    by_score = sorted(older, key=lambda step: (known[step], step), reverse=True)
    kept = {*ordered[-newest:], *by_score[:best]}
    if best and in_evaluation in ordered:
        kept.add(in_evaluation)
    return kept


def read_scores(metrics_path: Path, kind: ScoreKind) -> dict[int, float]:
    """Return the scores of the steps that have one."""
    rows = read_metrics(metrics_path)
    if kind == "held_out":
        return _by_step(rows, _accuracy)
    if kind == "held_out_loss":
        return {step: -loss for step, loss in held_out_losses(rows).items()}
    return _rewards(rows)


def held_out_losses(rows: Sequence[MetricsRow]) -> dict[int, float]:
    """Return the held-out loss by step; the later one if a step has two."""
    return _by_step(rows, lambda row: row.get(HELD_OUT_LOSS))


def _by_step(
    rows: Sequence[MetricsRow], value_of: Callable[[MetricsRow], float | None]
) -> dict[int, float]:
    values: dict[int, float] = {}
    for row in rows:
        value = value_of(row)
        if value is not None:
            values[int(row["step"] or 0)] = value
    return values


def _accuracy(row: MetricsRow) -> float | None:
    accuracies = [
        value
        for name, value in row.items()
        if name.startswith(_ACCURACY_PREFIX)
        and name.endswith(_ACCURACY_SUFFIX)
        and value is not None
    ]
    return fmean(accuracies) if accuracies else None


def _rewards(rows: Sequence[MetricsRow]) -> dict[int, float]:
    rewards = _by_step(rows, lambda row: row.get(_REWARD))
    scores: dict[int, float] = {}
    for step in rewards:
        recent = range(step - _REWARD_STEPS + 1, step + 1)
        scores[step] = fmean(rewards[other] for other in recent if other in rewards)
    return scores
