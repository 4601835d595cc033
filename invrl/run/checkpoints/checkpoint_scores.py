"""Scores of a step's weights from the run's metrics, and the checkpoints that stay
because of them.

The score is the held-out accuracy of the step's weights (the mean over sets and modes),
the mean training reward of the steps up to it, or the held-out loss, where lower is
better. A checkpoint is judged when a later one is saved. If the evaluation after its
step still runs then, it is judged by the save after that evaluation.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
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
        return _accuracies(rows)
    if kind == "held_out_loss":
        return {step: -loss for step, loss in held_out_losses(rows).items()}
    return _rewards(rows)


def held_out_losses(rows: Sequence[MetricsRow]) -> dict[int, float]:
    """Return the held-out loss by step; the later one if a step has two."""
    losses: dict[int, float] = {}
    for row in rows:
        loss = row.get(HELD_OUT_LOSS)
        if loss is not None:
            losses[int(row["step"] or 0)] = loss
    return losses


def _accuracies(rows: Sequence[MetricsRow]) -> dict[int, float]:
    scores: dict[int, float] = {}
    for row in rows:
        accuracies = [
            value
            for name, value in row.items()
            if name.startswith(_ACCURACY_PREFIX)
            and name.endswith(_ACCURACY_SUFFIX)
            and value is not None
        ]
        if accuracies:
            scores[int(row["step"] or 0)] = sum(accuracies) / len(accuracies)
    return scores


def _rewards(rows: Sequence[MetricsRow]) -> dict[int, float]:
    rewards: dict[int, float] = {}
    for row in rows:
        reward = row.get(_REWARD)
        if reward is not None:
            rewards[int(row["step"] or 0)] = reward
    scores: dict[int, float] = {}
    for step in rewards:
        recent = [
            rewards[other]
            for other in range(step - _REWARD_STEPS + 1, step + 1)
            if other in rewards
        ]
        scores[step] = sum(recent) / len(recent)
    return scores
