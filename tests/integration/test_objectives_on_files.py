"""sft, dpo and kto on trainer ranks, against float64 on the Hugging Face model: the
rows of a pair on two ranks, and a second optimizer step, in which the policy is no
longer the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from slow_cases import first_quick, named_quick
from tiny_model import make_tiny_model
from train_reference import Reference, Tensors, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.mismatched_samples import with_mismatched_samples
from invrl.train.batches.sharding import Shard, mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
EXACT = TrainConfig(train_dtype="float32", lr=3e-3, max_tokens_per_micro_batch=25)
LAYOUTS = {"one process": ParallelLayout(), "DP": ParallelLayout(data=2)}
BETA = 0.5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def rows_of_file(seed: int, numbers: list[dict[str, float]]) -> TrainBatch:
    """Four groups with as many rows as `numbers`, all answers to the group's prompt."""
    batch = random_batch(seed, temperature=1.0)
    samples: list[TrainSample] = []
    taken: dict[str, int] = {}
    for sample in batch.samples:
        at = taken.get(sample.group_id, 0)
        if at < len(numbers) and sample.loss_mask_T.any():
            taken[sample.group_id] = at + 1
            samples.append(
                replace(
                    sample, numbers=numbers[at], rollout_id=f"{sample.rollout_id}-{at}"
                )
            )
    zeros = tuple(np.zeros(len(sample.tokens_T), np.float32) for sample in samples)
    return replace(batch, samples=tuple(samples), advantages=zeros)


class Exact(Reference):
    """Losses of a whole mini-batch in one graph."""

    def sums(
        self, samples: list[TrainSample], initial: Reference
    ) -> list[torch.Tensor]:
        """Log-ratios of whole rows to the reference."""
        frozen = initial.frozen_logprobs(samples)
        return [
            self.logprobs(sample).sum() - at.sum()
            for sample, at in zip(samples, frozen, strict=True)
        ]

    def sft(self, batch: TrainBatch) -> torch.Tensor:
        tokens = sum(int(sample.loss_mask_T.sum()) for sample in batch.samples)
        weighted = [
            float(np.float32(sample.numbers["weight"])) * self.logprobs(sample).sum()
            for sample in batch.samples
        ]
        return -torch.stack(weighted).sum() / tokens

    def dpo(self, batch: TrainBatch, initial: Reference) -> torch.Tensor:
        by_group: dict[str, dict[float, torch.Tensor]] = {}
        samples = list(batch.samples)
        for sample, gap in zip(samples, self.sums(samples, initial), strict=True):
            by_group.setdefault(sample.group_id, {})[sample.numbers["chosen"]] = gap
        margins = torch.stack([pair[1.0] - pair[0.0] for pair in by_group.values()])
        return -F.logsigmoid(BETA * margins).mean()

    def kto(self, batch: TrainBatch, initial: Reference) -> torch.Tensor:
        samples = list(batch.samples)
        gaps = self.sums(samples, initial)
        others = [
            g for s, g in zip(samples, gaps, strict=True) if s.numbers["mismatched"]
        ]
        z = torch.stack(others).mean().detach().clamp(min=0)
        losses: list[torch.Tensor] = []
        for sample, gap in zip(samples, gaps, strict=True):
            if not sample.numbers["mismatched"]:
                side = 1.0 if sample.numbers["desirable"] else -1.0
                losses.append(1 - torch.sigmoid(side * BETA * (gap - z)))
        return torch.stack(losses).mean()

    def gradients_of_objective(
        self, name: str, batch: TrainBatch, initial: Reference
    ) -> tuple[float, Tensors]:
        loss = self.sft(batch) if name == "sft" else getattr(self, name)(batch, initial)
        return loss.item(), self.gradients_of(loss)


def row_by_row(minis: list[TrainBatch], ranks: int) -> list[Shard]:
    """Each rank has every second row of a mini-batch, so that pairs are split."""

    def share(mini: TrainBatch, rank: int) -> TrainBatch:
        return replace(
            mini,
            samples=mini.samples[rank::ranks],
            advantages=mini.advantages[rank::ranks],
        )

    return [tuple(share(mini, rank) for mini in minis) for rank in range(ranks)]


def batch_for(name: str) -> TrainBatch:
    if name == "sft":
        return rows_of_file(3, [{"weight": 1.0}, {"weight": 0.3}, {"weight": 2.0}])
    if name == "dpo":
        return rows_of_file(3, [{"chosen": 0.0}, {"chosen": 1.0}])
    return with_mismatched_samples(
        rows_of_file(3, [{"desirable": 1.0}, {"desirable": 0.0}]), max_tokens=0
    )


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_two_steps_of_sft_dpo_and_kto_equal_float64(
    pool: RankPool, model: Path, name: str, layout: ParallelLayout
) -> None:
    beta = {} if name == "sft" else {name: {"beta": BETA}}
    algorithm = AlgorithmConfig.model_validate({"objective": name, **beta})
    trainer = pool.build(model, layout=layout, train=EXACT, algorithm=algorithm)
    batch = batch_for(name)
    minis = mini_batches(batch, 2)
    metrics = resolve(trainer.train_shards(row_by_row(minis, layout.data)))
    assert metrics["optimizer_steps"] == 2
    initial = Exact(model)
    first, second = trainer.steps()
    losses: list[float] = []
    for at, (mini, step) in enumerate(zip(minis, (first, second), strict=True)):
        policy = Exact(model, first.weights) if at else initial
        loss, gradients = policy.gradients_of_objective(name, mini, initial)
        losses.append(loss)
        gap, tensor = worst(step.gradients, gradients)
        assert gap < BOUND, f"step {at}: {tensor}"
    if name == "dpo":  # two pairs in each step
        assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize("name", first_quick(["sft", "dpo"]))
def test_training_lowers_the_loss_of_its_own_rows(
    pool: RankPool, model: Path, name: str
) -> None:
    trainer = pool.build(model, train=EXACT, algorithm=AlgorithmConfig(objective=name))
    batch = batch_for(name)
    losses = [resolve(trainer.train(batch))["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
