"""An objective of the user's, in every layout of ranks, against float64 on the Hugging Face model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from tiny_model import make_tiny_model
from train_reference import Reference, Tensors, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import PluginError, TrainError
from invrl.metrics import resolve
from invrl.train.config import TrainConfig
from invrl.train.parallel.layout import ParallelLayout
from invrl.train.sharding import mini_batches
from invrl.types import TrainBatch, TrainSample

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_microbatch=25)
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
    """Rows with a column and a number of their own; a rollout of two branches, a row that trains nothing."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for sample in batch.samples:
        weight_T = rng.uniform(0.5, 2, len(sample.tokens_T)).astype(np.float32)
        samples.append(
            replace(sample, columns={"weight": weight_T}, numbers={"score": rng.normal(), "unread": 1.0})
        )
    return replace(batch, samples=tuple(samples))


class ExactEverything(Reference):
    """`user_objectives.Everything` over a whole mini-batch, rows coupled within one graph."""

    def logprobs_and_entropies(self, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
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
            weight_N = torch.from_numpy(sample.columns["weight"][sample.loss_mask_T]).double()
            score = float(np.float32(sample.numbers["score"]))
            loss = loss + score * (weight_N * (current_N - reference_N) ** 2).mean() / rollouts
            loss = loss - 0.3 * (weight_N * entropy_N).sum() / tokens
            sums[sample.group_id].append(current_N.sum())
        for group in groups:
            group_sums = torch.stack(sums[group])
            loss = loss + ((group_sums - group_sums.mean()) ** 2).sum() / 2 / len(groups)
        return self.gradients_of(loss)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_objective_reads_columns_numbers_entropies_and_other_rows(
    pool: RankPool, model: Path, layout: ParallelLayout
) -> None:
    """Two optimizer steps: in the second one the policy is no longer the reference, and the sums of rows are
    those of that step's weights."""
    algorithm = AlgorithmConfig(objective="user_objectives:everything")
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=algorithm)
    batch = batch_with_numbers(1)
    metrics = resolve(trainer.train(batch, steps=2))
    trained = [sample for sample in batch.samples if sample.loss_mask_T.any()]
    assert metrics["scores"] == pytest.approx(sum(sample.numbers["score"] for sample in trained), rel=1e-5)
    assert metrics["optimizer_steps"] == 2
    initial = ExactEverything(model)
    first, second = trainer.steps()
    for at, (mini, step) in enumerate(zip(mini_batches(batch, 2), (first, second), strict=True)):
        policy = ExactEverything(model, first.weights) if at else initial
        gap, name = worst(step.gradients, policy.gradients_of_everything(mini, initial))
        assert gap < BOUND, f"step {at}: {name}"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("of_wrong_shape", r"its loss is a tensor of shape \[\d+\], not a scalar"),
        ("without_gradient", "it has no gradient"),
        ("a_number", "it returned float, not LossOutputs"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_named(pool: RankPool, model: Path, name: str, reason: str) -> None:
    trainer = pool.build(model, train=EXACT, algorithm=AlgorithmConfig(objective=f"user_objectives:{name}"))
    start = trainer.weights()
    with pytest.raises((PluginError, TrainError), match=reason):
        trainer.train(batch_with_numbers(0))
    assert all(np.array_equal(weight, start[key]) for key, weight in trainer.weights().items())
