"""An objective of the user's, in every layout of ranks, against float64 on the Hugging
Face model."""

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
from invrl.errors import PluginError, TrainError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import resolve
from invrl.types.weights import WeightVersion

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)
LAYOUTS = {
    "one process": ParallelLayout(),
    "DP": ParallelLayout(data=2),
    "TP": ParallelLayout(tensor=2),
    "CP": ParallelLayout(context=2),
    "PP": ParallelLayout(pipeline=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def batch_with_numbers(seed: int) -> TrainBatch:
    """Rows with a column and a number of their own; a rollout of two branches, a row
    that trains nothing."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for sample in batch.samples:
        weight_T = rng.uniform(0.5, 2, len(sample.tokens_T)).astype(np.float32)
        samples.append(
            replace(
                sample,
                columns={"weight": weight_T},
                numbers={"score": rng.normal(), "unread": 1.0},
            )
        )
    return replace(batch, samples=tuple(samples))


class ExactEverything(Reference):
    """`user_objectives.Everything` over a whole mini-batch, rows coupled within one
    graph."""

    def logprobs_and_entropies(
        self, sample: TrainSample
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_T = torch.from_numpy(sample.tokens_T.astype(np.int64))
        logprobs_TV = self.distributions(tokens_T, sample.temperature)
        mask_T = torch.from_numpy(sample.loss_mask_T[1:])
        picked_T = logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        return picked_T[mask_T], entropy_T[mask_T]

    def gradients_of_everything(self, batch: TrainBatch, initial: Reference) -> Tensors:
        samples = [sample for sample in batch.samples if sample.loss_mask_T.any()]
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in samples)
        rollouts = len({sample.rollout_id for sample in samples})
        groups = {sample.group_id for sample in samples}
        frozen = initial.frozen_logprobs(samples)
        sums: dict[str, list[torch.Tensor]] = {group: [] for group in groups}
        loss = torch.zeros((), dtype=torch.float64)
        for sample, reference_N in zip(samples, frozen, strict=True):
            current_N, entropy_N = self.logprobs_and_entropies(sample)
            weight_N = torch.from_numpy(
                sample.columns["weight"][sample.loss_mask_T]
            ).double()
            score = float(np.float32(sample.numbers["score"]))
            loss = (
                loss
                + score * (weight_N * (current_N - reference_N) ** 2).mean() / rollouts
            )
            loss = loss - 0.3 * (weight_N * entropy_N).sum() / tokens
            sums[sample.group_id].append(current_N.sum())
        for group in groups:
            group_sums = torch.stack(sums[group])
            loss = loss + ((group_sums - group_sums.mean()) ** 2).sum() / 2 / len(
                groups
            )
        return self.gradients_of(loss)


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
def test_user_objective_reads_columns_numbers_entropies_and_other_samples(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    """Two optimizer steps: in the second one the policy is no longer the reference, and
    the sums of rows are those of that step's weights."""
    algorithm = AlgorithmConfig(objective="user_objectives:everything")
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=algorithm)
    batch = batch_with_numbers(1)
    metrics = resolve(trainer.train(batch, steps=2))
    trained = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    assert metrics["scores"] == pytest.approx(
        sum(sample.numbers["score"] for sample in trained), rel=1e-5
    )
    assert metrics["optimizer_steps"] == 2
    initial = ExactEverything(model)
    first, second = trainer.steps()
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = ExactEverything(model, first.weights) if at else initial
        gap, name = worst(step.gradients, policy.gradients_of_everything(mini, initial))
        assert gap < BOUND, f"step {at}: {name}"


class ExactSequences(ExactEverything):
    """GSPO with a weight of rows and an entropy bonus, over a whole mini-batch."""

    def gradients_of_sequences(
        self, batch: TrainBatch, algorithm: AlgorithmConfig, initial: Reference
    ) -> Tensors:
        pairs = zip(batch.samples, batch.advantages, strict=True)
        trained = [
            (sample, advantages_T)
            for sample, advantages_T in pairs
            if sample.loss_mask_T.any()
        ]
        loss = torch.zeros((), dtype=torch.float64)
        for sample, advantages_T in trained:
            mask_T = sample.loss_mask_T
            current_N, entropy_N = self.logprobs_and_entropies(sample)
            [old_N] = initial.frozen_logprobs([sample])
            rollout_N = torch.from_numpy(sample.rollout_logprobs_T[mask_T]).double()
            advantage = float(advantages_T[mask_T][0])
            ratio = torch.exp((current_N - old_N).mean())
            bounded = torch.clip(
                ratio, 1 - algorithm.eps_clip_low, 1 + algorithm.eps_clip_high
            )
            policy_loss = -torch.min(ratio * advantage, bounded * advantage)
            weight = torch.clip(
                torch.exp((old_N - rollout_N).mean()), max=algorithm.correction_cap
            )
            assert algorithm.entropy is not None
            bonus = algorithm.entropy.coefficient * entropy_N.mean()
            loss = loss + (weight * policy_loss - bonus) / len(trained)
        return self.gradients_of(loss)


@pytest.mark.parametrize("name", first_quick(["CP", "DP", "one process"]))
def test_sequence_ratio_does_not_depend_on_how_samples_are_divided(
    pool: RankPool, model: Path, name: str
) -> None:
    algorithm = AlgorithmConfig(
        ratio_level="sequence",
        eps_clip_low=0.03,
        eps_clip_high=0.03,
        dual_clip=None,
        correction="geometric_truncated",
        aggregation="sequence_mean",
        entropy={"coefficient": 0.1},
        num_mini_batches=2,
    )
    trainer = pool.build(model, layout=LAYOUTS[name], train=EXACT, algorithm=algorithm)
    batch = random_batch(2)
    metrics = resolve(trainer.train(batch, steps=2))
    assert 0.0 < metrics["clip_fraction"] < 1.0
    initial = ExactSequences(model)
    first, second = trainer.steps()
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = ExactSequences(model, first.weights) if at else initial
        gap, tensor = worst(
            step.gradients, policy.gradients_of_sequences(mini, algorithm, initial)
        )
        assert gap < BOUND, f"step {at}: {tensor}"


def test_interpolated_old_policy_uses_the_age_of_each_token(
    pool: RankPool, model: Path
) -> None:
    """Tokens of versions 1 to 3, trained at version 3; in the second step the current
    policy is another."""
    algorithm = AlgorithmConfig(
        old_logprobs="invrl.contrib.a3po:Interpolated",
        correction_cap=5.0,
        num_mini_batches=2,
    )
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    rng = np.random.default_rng(0)
    batch = random_batch(3)
    samples: list[TrainSample] = []
    for sample in batch.samples:
        versions_T = rng.integers(1, 4, len(sample.tokens_T)).astype(np.int32)
        samples.append(
            replace(sample, versions_T=np.where(sample.loss_mask_T, versions_T, -1))
        )
    batch = replace(batch, samples=tuple(samples), version=WeightVersion(3))
    metrics = resolve(trainer.train(batch, steps=2))
    assert metrics["clip_fraction"] > 0.0, (
        "also where the first step has no older policy of its own"
    )
    first, second = trainer.steps()
    for at, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        policy = Reference(model, first.weights if at else None)
        old: list[torch.Tensor] = []
        for sample, current_N in zip(
            mini.samples, policy.frozen_logprobs(mini.samples), strict=True
        ):
            mask_T = sample.loss_mask_T
            age_N = 3.0 - torch.from_numpy(sample.versions_T[mask_T]).double()
            rollout_N = torch.from_numpy(sample.rollout_logprobs_T[mask_T]).double()
            share_N = torch.where(age_N > 0, 1 / age_N, 0.0)
            old.append(share_N * rollout_N + (1 - share_N) * current_N)
        gap, name = worst(
            step.gradients, policy.gradients(mini, algorithm, old=old, reference=None)
        )
        assert gap < BOUND, f"step {at}: {name}"


@pytest.mark.parametrize(
    ("name", "reason"),
    first_quick(
        [
            ("of_wrong_shape", r"its loss is a tensor of shape \[\d+\], not a scalar"),
            ("without_gradient", "it has no gradient"),
            ("a_number", "it returned float, not LossOutputs"),
        ]
    ),
)
def test_objective_whose_loss_cannot_be_trained_is_named(
    pool: RankPool, model: Path, name: str, reason: str
) -> None:
    trainer = pool.build(
        model,
        train=EXACT,
        algorithm=AlgorithmConfig(objective=f"user_objectives:{name}"),
    )
    start = trainer.weights()
    with pytest.raises((PluginError, TrainError), match=reason):
        trainer.train(batch_with_numbers(0))
    check_same_bits(trainer.weights(), start)


def test_objective_that_overwrites_a_number_of_the_samples_is_refused(
    pool: RankPool, model: Path
) -> None:
    """`couple` returns a number of a name that the rows have."""
    algorithm = AlgorithmConfig(objective="user_objectives:one_name_twice")
    trainer = pool.build(model, train=EXACT, algorithm=algorithm)
    with pytest.raises(TrainError, match="the number 'score', which they have already"):
        trainer.train(batch_with_numbers(0))
