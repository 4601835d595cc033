"""The optimizer against AdamW written out in float64, on the gradients that the trainer
itself computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from rank_pool import Arrays, RankPool, Step
from slow_cases import first_quick
from tiny_model import make_tiny_model
from train_reference import random_batch

from invrl.train.config import TrainConfig

EPS = 1e-8
STEPS = 5


def adamw(
    start: Arrays, steps: list[Step], train: TrainConfig
) -> list[dict[str, NDArray[np.float64]]]:
    """Weights after each step (Loshchilov and Hutter 2019, algorithm 2). Norms and
    biases do not decay."""
    weights = {name: weight.astype(np.float64) for name, weight in start.items()}
    first = {name: np.zeros_like(weight) for name, weight in weights.items()}
    second = {name: np.zeros_like(weight) for name, weight in weights.items()}
    after: list[dict[str, NDArray[np.float64]]] = []
    for t, step in enumerate(steps, start=1):
        for name in weights:
            gradient = step.gradients[name].astype(np.float64)
            first[name] = (
                train.adam_beta1 * first[name] + (1 - train.adam_beta1) * gradient
            )
            second[name] = (
                train.adam_beta2 * second[name] + (1 - train.adam_beta2) * gradient**2
            )
            mean = first[name] / (1 - train.adam_beta1**t)
            square = second[name] / (1 - train.adam_beta2**t)
            decay = train.weight_decay if weights[name].ndim > 1 else 0.0
            moved = weights[name] * (1 - train.lr * decay)
            weights[name] = moved - train.lr * mean / (np.sqrt(square) + EPS)
        after.append(dict(weights))
    return after


@pytest.mark.parametrize(
    "fields",
    first_quick([{"weight_decay": 0.5}, {"adam_beta2": 0.6}, {"adam_beta1": 0.5}, {}]),
    ids=["weight_decay", "beta2", "beta1", "beyond_the_first_step"],
)
def test_every_optimizer_step_equals_adamw(
    pool: RankPool, tmp_path: Path, fields: dict[str, float]
) -> None:
    given = {"train_dtype": "float32", "lr": 1e-3, "clip_grad": None, **fields}
    train = TrainConfig.model_validate(given)
    trainer = pool.build(make_tiny_model(tmp_path / "model"), train=train)
    start = trainer.weights()
    for seed in range(STEPS):
        trainer.train(random_batch(seed))
    steps = trainer.steps()
    assert len(steps) == STEPS
    for t, (step, expected) in enumerate(
        zip(steps, adamw(start, steps, train), strict=True), start=1
    ):
        for name, weight in step.weights.items():
            gap = np.abs(weight - expected[name]).max()
            assert gap < 0.005 * train.lr, (
                f"step {t}: {name} is off by {gap / train.lr:.3f} of a step"
            )
