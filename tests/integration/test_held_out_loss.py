"""The loss of held-out rows, and the supervised loss, against float64 on the Hugging
Face model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_pool import RankPool
from slow_cases import first_quick, named_quick
from test_objectives import BOUND, EXACT, LAYOUTS, ExactEverything, batch_with_numbers
from tiny_model import make_tiny_model
from train_reference import Reference, check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve

SFT = AlgorithmConfig(objective="sft")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def mean_loss(model: Reference, batch: TrainBatch) -> float:
    """Mean negative log-likelihood of the trained tokens, in nats."""
    samples = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    return float(
        -np.concatenate(
            [logprobs.numpy() for logprobs in model.frozen_logprobs(samples)]
        ).mean()
    )


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
def test_held_out_evaluation_changes_no_weight(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    """Between two steps it gives the loss of the weights after the first one, and the
    second step is the one that would have been made without it."""
    first = random_batch(0)
    second = random_batch(1)
    held_out = random_batch(2)
    weights = []
    for evaluates in (False, True):
        trainer = pool.build(model, layout=layout, train=EXACT, algorithm=SFT)
        if evaluates:
            assert resolve(trainer.evaluate(held_out))["loss"] == pytest.approx(
                mean_loss(Reference(model), held_out), rel=1e-5
            )
        trainer.train(first)
        [step] = trainer.steps()
        if evaluates:
            found = resolve(trainer.evaluate(held_out))["loss"]
            assert found == pytest.approx(
                mean_loss(Reference(model, step.weights), held_out), rel=1e-5
            )
        trainer.train(second)
        weights.append(trainer.weights())
    measured, plain = weights
    check_same_bits(measured, plain)


@pytest.mark.parametrize(
    "layout",
    first_quick([LAYOUTS["one process"], LAYOUTS["DP"]]),
    ids=["one process", "DP"],
)
def test_supervised_loss_has_the_gradient_of_hugging_face(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=SFT)
    batch = random_batch(3)
    metrics = resolve(trainer.train(batch))
    reference = Reference(model)
    assert metrics["loss"] == pytest.approx(mean_loss(reference, batch), rel=1e-5)
    samples = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
    expected = ExactEverything(model)
    loss = -sum(expected.logprobs(sample).sum() for sample in samples) / tokens
    [step] = trainer.steps()
    gap, name = worst(step.gradients, expected.gradients_of(loss))
    assert gap < BOUND, name


def test_held_out_evaluation_works_for_an_objective_that_compares_samples(
    pool: RankPool, model: Path
) -> None:
    """It reads the reference, numbers of its rows, and the table of all rows. The value
    of its loss at the initial weights, where the policy is the reference."""
    algorithm = AlgorithmConfig(objective="user_objectives:everything")
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    batch = batch_with_numbers(4)
    metrics = resolve(trainer.evaluate(batch))
    samples = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    assert metrics["scores"] == pytest.approx(
        sum(sample.numbers["score"] for sample in samples), rel=1e-5
    )
    exact = ExactEverything(model)
    sums: dict[str, list[float]] = {}
    entropies = 0.0
    for sample in samples:
        logprobs_N, entropy_N = exact.logprobs_and_entropies(sample)
        sums.setdefault(sample.group_id, []).append(float(logprobs_N.detach().sum()))
        entropies += float(
            (
                entropy_N.detach().numpy()
                * sample.columns["weight"][sample.loss_mask_T]
            ).sum()
        )
    slopes = sum(
        (row - np.mean(of_group)) * row
        for of_group in sums.values()
        for row in of_group
    )
    tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
    expected = slopes / len(sums) - 0.3 * entropies / tokens
    assert metrics["loss"] == pytest.approx(expected, rel=1e-3)
