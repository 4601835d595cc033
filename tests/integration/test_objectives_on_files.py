"""sft, dpo and kto on trainer ranks, against float64 on the Hugging Face model: the
rows of a pair on two ranks, and a second optimizer step, in which the policy is no
longer the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
from invrl.algorithms.objectives.mismatched_samples import with_mismatched_samples
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
    zeros: list[np.ndarray] = []
    num_rows: Counter[str] = Counter()
    for sample in batch.samples:
        place = num_rows[sample.group_id]
        if place == len(numbers) or not sample.loss_mask_T.any():
            continue
        num_rows[sample.group_id] += 1
        row = replace(
            sample,
            numbers=numbers[place],
            rollout_id=f"{sample.rollout_id}-{place}",
        )
        samples.append(row)
        zeros.append(np.zeros(len(row.tokens_T), np.float32))
    return replace(
        batch,
        samples=tuple(samples),
        advantages=tuple(zeros),
    )


class Exact(Reference):
    """Losses of a whole mini-batch in one graph."""

    def log_ratios(
        self,
        batch: TrainBatch,
        initial: Reference,
    ) -> Iterator[tuple[TrainSample, torch.Tensor]]:
        """Each row, and its log-ratio to the reference."""
        samples = list(batch.samples)
        reference = initial.frozen_logprobs(samples)
        for sample, reference_N in zip(samples, reference, strict=True):
            log_ratio = self.logprobs(sample).sum() - reference_N.sum()
            yield sample, log_ratio

    def sft(self, batch: TrainBatch, initial: Reference) -> torch.Tensor:
        num_tokens = 0
        weighted: list[torch.Tensor] = []
        for sample in batch.samples:
            num_tokens += int(sample.loss_mask_T.sum())
            weight = float(np.float32(sample.numbers["weight"]))
            weighted.append(weight * self.logprobs(sample).sum())
        return -torch.stack(weighted).sum() / num_tokens

    def dpo(self, batch: TrainBatch, initial: Reference) -> torch.Tensor:
        chosen: dict[str, torch.Tensor] = {}
        rejected: dict[str, torch.Tensor] = {}
        for sample, log_ratio in self.log_ratios(batch, initial):
            side = chosen if sample.numbers["chosen"] else rejected
            side[sample.group_id] = log_ratio
        assert chosen.keys() == rejected.keys()
        margins = [chosen[group] - rejected[group] for group in chosen]
        return -F.logsigmoid(BETA * torch.stack(margins)).mean()

    def kto(self, batch: TrainBatch, initial: Reference) -> torch.Tensor:
        mismatched: list[torch.Tensor] = []
        gains: list[tuple[float, torch.Tensor]] = []
        for sample, log_ratio in self.log_ratios(batch, initial):
            if sample.numbers["mismatched"]:
                mismatched.append(log_ratio)
            else:
                sign = 2 * sample.numbers["desirable"] - 1
                gains.append((sign, log_ratio))
        baseline = torch.stack(mismatched).mean().detach()
        baseline = baseline.clamp(min=0)
        losses = [
            1 - torch.sigmoid(sign * BETA * (log_ratio - baseline))
            for sign, log_ratio in gains
        ]
        return torch.stack(losses).mean()

    def gradients_of_objective(
        self,
        name: str,
        batch: TrainBatch,
        initial: Reference,
    ) -> tuple[float, Tensors]:
        objectives = {
            "sft": self.sft,
            "dpo": self.dpo,
            "kto": self.kto,
        }
        loss = objectives[name](batch, initial)
        return loss.item(), self.gradients_of(loss)


def row_by_row(
    minis: list[TrainBatch],
    num_ranks: int,
) -> list[Shard]:
    """Each rank has every second row of a mini-batch, so that pairs are split."""
    shards: list[Shard] = []
    for rank in range(num_ranks):
        every_second = slice(rank, None, num_ranks)
        shard = [
            replace(
                mini,
                samples=mini.samples[every_second],
                advantages=mini.advantages[every_second],
            )
            for mini in minis
        ]
        shards.append(tuple(shard))
    return shards


def batch_for(name: str) -> TrainBatch:
    if name == "sft":
        weights = (1.0, 0.3, 2.0)
        return rows_of_file(3, [{"weight": weight} for weight in weights])
    if name == "dpo":
        return rows_of_file(3, [{"chosen": 0.0}, {"chosen": 1.0}])
    rows = rows_of_file(3, [{"desirable": 1.0}, {"desirable": 0.0}])
    return with_mismatched_samples(rows, max_tokens=0)


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "DP"))
@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_two_steps_of_sft_dpo_and_kto_equal_float64(
    pool: RankPool,
    model: Path,
    name: str,
    layout: ParallelLayout,
) -> None:
    settings: dict[str, object] = {"objective": name}
    if name != "sft":
        settings[name] = {"beta": BETA}
    trainer = pool.build(
        model,
        layout=layout,
        train=EXACT,
        algorithm=AlgorithmConfig.model_validate(settings),
    )
    minis = mini_batches(batch_for(name), 2)
    shards = row_by_row(minis, layout.data)
    metrics = resolve(trainer.train_shards(shards))
    assert metrics["optimizer_steps"] == 2
    steps = trainer.steps()
    initial = Exact(model)
    policies = [initial, Exact(model, steps[0].weights)]
    losses: list[float] = []
    for policy, mini, step in zip(policies, minis, steps, strict=True):
        loss, gradients = policy.gradients_of_objective(name, mini, initial)
        losses.append(loss)
        gap, tensor = worst(step.gradients, gradients)
        assert gap < BOUND, f"step {len(losses)}: {tensor}"
    if name == "dpo":  # two pairs in each step
        assert metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-5)


@pytest.mark.parametrize("name", first_quick(["sft", "dpo"]))
def test_training_lowers_the_loss_of_its_own_rows(
    pool: RankPool,
    model: Path,
    name: str,
) -> None:
    trainer = pool.build(
        model,
        train=EXACT,
        algorithm=AlgorithmConfig(objective=name),
    )
    batch = batch_for(name)
    losses: list[float] = []
    for _ in range(4):
        metrics = resolve(trainer.train(batch))
        losses.append(metrics["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
