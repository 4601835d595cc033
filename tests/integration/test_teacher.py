"""A teacher that the trainer computes, against float64 on the Hugging Face models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rank_pool import RankPool
from slow_cases import named_quick
from tiny_model import make_tiny_model
from train_reference import Reference, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)
LAYOUTS = {
    "one process": ParallelLayout(),
    "DP": ParallelLayout(data=2),
    "TP": ParallelLayout(tensor=2),
}
DISTILLATION = AlgorithmConfig(objective="distillation", kl={"coefficient": 0.1})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "qwen3", seed=7)


def with_gaps(batch: TrainBatch, teacher: Reference, old: Reference) -> TrainBatch:
    """Advantages that are the gaps to the teacher."""
    advantages = []
    samples = list(batch.samples)
    for sample, at, before in zip(
        samples,
        teacher.frozen_logprobs(samples),
        old.frozen_logprobs(samples),
        strict=True,
    ):
        advantages_T = np.zeros(len(sample.tokens_T))
        advantages_T[sample.loss_mask_T] = (at - before).numpy()
        advantages.append(advantages_T)
    return replace(batch, advantages=tuple(advantages))


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
def test_two_distillation_steps_equal_float64(
    pool: RankPool, model: Path, teacher: Path, layout: ParallelLayout
) -> None:
    """With a reference beside the teacher: the initial model. Rewards do not matter."""
    trainer = pool.build(
        model, teacher=teacher, layout=layout, train=EXACT, algorithm=DISTILLATION
    )
    batch = random_batch(5)
    metrics = resolve(trainer.train(batch, steps=2))
    assert metrics["optimizer_steps"] == 2
    initial = Reference(model)
    frozen = Reference(teacher)
    first, second = trainer.steps()
    gaps = []
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = Reference(model, first.weights) if at else initial
        mini = with_gaps(mini, frozen, initial)  # old is the model before the batch
        before = initial.frozen_logprobs(mini.samples)
        gap, name = worst(
            step.gradients,
            policy.gradients(mini, DISTILLATION, old=before, reference=before),
        )
        assert gap < BOUND, f"step {at}: {name}"
        gaps += [
            *np.concatenate(
                [
                    a[s.loss_mask_T]
                    for s, a in zip(mini.samples, mini.advantages, strict=True)
                ]
            )
        ]
    assert metrics["reverse_kl"] == pytest.approx(-np.mean(gaps), rel=1e-4)


def test_rows_without_a_teacher_column_are_refused_if_there_is_no_teacher(
    pool: RankPool, model: Path
) -> None:
    trainer = pool.build(model, train=EXACT, algorithm=DISTILLATION)
    batch = random_batch(5)
    with pytest.raises(TrainError, match="column 'teacher'"):
        trainer.train(batch)


def test_teacher_column_gives_the_same_step_as_a_teacher_model(
    pool: RankPool, model: Path, teacher: Path
) -> None:
    batch = random_batch(6)
    trainer = pool.build(model, teacher=teacher, train=EXACT, algorithm=DISTILLATION)
    trainer.train(batch)
    [computed] = trainer.steps()
    samples = []
    for sample, logprobs in zip(
        batch.samples, Reference(teacher).frozen_logprobs(batch.samples), strict=True
    ):
        teacher_T = np.zeros(len(sample.tokens_T), np.float32)
        teacher_T[sample.loss_mask_T] = logprobs.numpy()
        samples.append(replace(sample, columns={"teacher": teacher_T}))
    trainer = pool.build(model, train=EXACT, algorithm=DISTILLATION)
    trainer.train(replace(batch, samples=tuple(samples)))
    [given] = trainer.steps()
    gap, name = worst(given.gradients, computed.gradients)
    assert gap < BOUND, name
