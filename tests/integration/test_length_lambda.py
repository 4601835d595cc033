"""Weights of rollouts by their lengths, and the exponent that is learned with them, in
layouts of ranks, against float64 on the Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from slow_cases import first_quick, named_quick
from tiny_model import make_tiny_model
from train_reference import Reference, Tensors, check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import EntropyConfig
from invrl.contrib.lambda_grpo import LengthWeight
from invrl.train.batches.sharding import Shard, mini_batches
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
    "CP": ParallelLayout(context=2),
    "PP": ParallelLayout(pipeline=2),
}
LENGTHS = LengthWeight(exponent=2.0, scale=0.3)
LR = 0.5
BONUS = EntropyConfig(coefficient=0.01)
LEARNED = AlgorithmConfig(
    sample_weight="invrl.contrib.lambda_grpo:LengthWeight",
    adaptations=("invrl.contrib.lambda_grpo:LearnedExponent",),
    plugin={
        "LengthWeight": {"exponent": LENGTHS.exponent, "scale": LENGTHS.scale},
        "LearnedExponent": {"lr": LR},
    },
    num_mini_batches=2,
    entropy=BONUS,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def dealt_out(batch: TrainBatch, *, ranks: int) -> list[Shard]:
    """Two mini-batches, whose rows go to the ranks in turn. So the rollouts of a group
    are on all of them."""
    return [
        tuple(
            replace(
                mini,
                samples=mini.samples[rank::ranks],
                advantages=mini.advantages[rank::ranks],
            )
            for mini in mini_batches(batch, 2)
        )
        for rank in range(ranks)
    ]


class ExactLengths(Reference):
    """The loss over a whole mini-batch, with the exponent as a tensor."""

    def gradients_by_length(
        self,
        batch: TrainBatch,
        algorithm: AlgorithmConfig,
        exponent: float,
        initial: Reference,
    ) -> tuple[Tensors, float]:
        """Of the model and of the exponent."""
        power = torch.tensor(exponent, dtype=torch.float64, requires_grad=True)
        lengths: dict[str, dict[str, int]] = {}
        for sample in batch.samples:
            of_group = lengths.setdefault(sample.group_id, {})
            num_trained = int(sample.loss_mask_T.sum())
            if num_trained:
                of_group[sample.rollout_id] = (
                    of_group.get(sample.rollout_id, 0) + num_trained
                )
        weights: dict[str, torch.Tensor] = {}
        for of_group in lengths.values():
            tokens_G = torch.tensor(list(of_group.values()), dtype=torch.float64)
            z_G = (tokens_G - tokens_G.mean()) / (tokens_G.std() + 1e-8)
            powers_G = (1 + LENGTHS.scale * z_G) ** power
            weights |= dict(
                zip(of_group, len(of_group) * torch.softmax(powers_G, 0), strict=True)
            )
        tokens = sum(sum(of_group.values()) for of_group in lengths.values())
        loss = torch.zeros((), dtype=torch.float64)
        for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True):
            mask_T = sample.loss_mask_T
            if not mask_T.any():
                continue
            tokens_T = torch.from_numpy(sample.tokens_T.astype(np.int64))
            trained_TV = self.distributions(tokens_T, sample.temperature)[
                torch.from_numpy(mask_T[1:])
            ]
            current_N = trained_TV.gather(
                1, tokens_T[1:][torch.from_numpy(mask_T[1:]), None]
            )[:, 0]
            entropy_N = -(trained_TV.exp() * trained_TV).sum(-1)
            [old_N] = initial.frozen_logprobs([sample])
            rollout_N = torch.from_numpy(sample.rollout_logprobs_T[mask_T]).double()
            advantage_N = torch.from_numpy(advantages_T[mask_T]).double()
            ratio_N = torch.exp(current_N - old_N)
            clipped_N = torch.clip(
                ratio_N, 1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high
            )
            policy_loss_N = torch.min(ratio_N * advantage_N, clipped_N * advantage_N)
            dual_N = torch.max(policy_loss_N, algorithm.dual_clip * advantage_N)
            policy_loss_N = torch.where(advantage_N < 0, dual_N, policy_loss_N)
            correction_N = torch.clip(
                torch.exp(old_N - rollout_N), max=algorithm.correction_cap
            )
            losses_N = -correction_N * policy_loss_N - BONUS.coefficient * entropy_N
            loss = loss + weights[sample.rollout_id] * losses_N.sum() / tokens
        gradients = self.gradients_of(loss)
        assert power.grad is not None
        return gradients, float(power.grad)


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
def test_length_weights_and_learned_exponent_equal_float64_in_every_layout(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    """Two optimizer steps; the second one is weighted by what the exponent learned in
    the first. A rollout has two rows, and a group's rows lie in several micro-batches
    and on both ranks."""
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=LEARNED)
    batch = random_batch(4)
    metrics = resolve(trainer.train_shards(dealt_out(batch, ranks=layout.data)))
    initial = ExactLengths(model)
    first, second = trainer.steps()
    exponent = LENGTHS.exponent
    gradients: list[float] = []
    exponents: list[float] = []
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = ExactLengths(model, first.weights) if at else initial
        expected, gradient = policy.gradients_by_length(
            mini, LEARNED, exponent, initial
        )
        gap, tensor = worst(step.gradients, expected)
        assert gap < BOUND, f"step {at}: {tensor} is off by {gap:.1e}"
        exponents.append(exponent)
        gradients.append(gradient)
        exponent -= LR * gradient
    assert min(map(abs, gradients)) > 1e-3, "each step moves it"
    assert metrics["length_lambda_gradient"] == pytest.approx(sum(gradients), rel=BOUND)
    assert metrics["length_lambda"] == pytest.approx(sum(exponents) / 2, rel=BOUND)
    learned = trainer.each("length_lambda")
    assert learned[0] == pytest.approx(exponent, rel=BOUND)
    assert len(set(learned)) == 1, "on every rank the same number"


def test_length_exponent_of_0_that_is_not_learned_changes_no_bit(
    pool: RankPool, model: Path
) -> None:
    batch = random_batch(5)
    weights = []
    for algorithm in (
        AlgorithmConfig(),
        AlgorithmConfig(sample_weight=LEARNED.sample_weight),
    ):
        trainer = pool.build(model, train=EXACT, algorithm=algorithm)
        trainer.train(batch, steps=2)
        weights.append(trainer.weights())
    first, second = weights
    check_same_bits(first, second)


def test_skipped_step_does_not_move_the_length_exponent(
    pool: RankPool, model: Path
) -> None:
    """One without any gradient, and one whose loss is not finite."""
    batch = random_batch(5)
    nothing = [np.zeros_like(advantages_T) for advantages_T in batch.advantages]
    broken = [
        np.where(sample.loss_mask_T, np.inf, 0.0).astype(np.float32)
        for sample in batch.samples
    ]
    algorithm = LEARNED.model_copy(update={"entropy": None})
    trainer = pool.build(model, layout=LAYOUTS["DP"], train=EXACT, algorithm=algorithm)
    for advantages, counter in (
        (nothing, "skipped_steps"),
        (broken, "nonfinite_steps"),
    ):
        metrics = resolve(
            trainer.train(
                TrainBatch(
                    batch_id=0,
                    version=batch.version,
                    samples=batch.samples,
                    advantages=tuple(advantages),
                )
            )
        )
        assert metrics[counter] == 1
        assert trainer.each("length_lambda") == [2.0, 2.0]


@pytest.mark.parametrize("name", first_quick(["DP", "PP"]))
def test_checkpoint_restores_the_length_exponent_bit_for_bit(
    pool: RankPool, model: Path, tmp_path: Path, name: str
) -> None:
    """A trainer that loads the checkpoint goes on as the one that saved it."""
    trainer = pool.build(model, layout=LAYOUTS[name], train=EXACT, algorithm=LEARNED)
    trainer.train(random_batch(1), steps=2)
    saved = trainer.each("length_lambda")
    trainer.each("save", str(tmp_path / "checkpoint"))
    trainer.train(random_batch(2), steps=2)
    after = trainer.each("length_lambda")
    weights = trainer.weights()

    resumed = pool.build(model, layout=LAYOUTS[name], train=EXACT, algorithm=LEARNED)
    assert resumed.each("length_lambda") == [2.0, 2.0]
    resumed.each("load", str(tmp_path / "checkpoint"))
    assert resumed.each("length_lambda") == saved
    assert saved[0] not in (2.0, after[0])
    resumed.train(random_batch(2), steps=2)
    assert resumed.each("length_lambda") == after
    check_same_bits(resumed.weights(), weights)
