"""Routing replay in the trainer, against Hugging Face's model in float64 whose routers are given the same
experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool
from train_reference import Arrays, Reference, random_batch, relative, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.metrics import resolve
from invrl.train.config import TrainConfig
from invrl.train.parallel.layout import ParallelLayout
from invrl.train.sharding import mini_batches
from invrl.types import TrainSample

BOUND = 1e-5  # norm-relative, per tensor
LAYERS = 4
EXPERTS = 8
CHOSEN = 2
DENSE_LAYERS = (0, 2)
ALGORITHM = AlgorithmConfig(eps_clip_low=0.1, eps_clip_high=0.15)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SMOOTH = {"adam_eps": 1e-2}
"""With Adam's usual eps the first step is the sign of the gradient, which the last bit decides."""

Choices = NDArray[np.int64]
"""[T, layers, K]: the experts of each token of a row; -1 where the router chooses."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("routed") / "model",
        "qwen3_moe",
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        mlp_only_layers=list(DENSE_LAYERS),
    )


class RoutedReference(Reference):
    """Its routers take the experts that `choices` holds for the row, and note what they would have chosen."""

    def __init__(self, path: Path, weights: Arrays | None = None) -> None:
        super().__init__(path, weights)
        self.choices: dict[bytes, Choices] = {}
        """By the row's tokens."""
        self.own: dict[bytes, Choices] = {}
        self._row = b""
        for number, layer in enumerate(self.model.model.layers):
            if number not in DENSE_LAYERS:
                self._take_over(number, layer.mlp.gate)

    def logprobs(self, sample: TrainSample) -> torch.Tensor:
        self._row = sample.tokens_T.tobytes()
        self.own[self._row] = np.full((len(sample.tokens_T), LAYERS, CHOSEN), -1)
        return super().logprobs(sample)

    def _take_over(self, number: int, gate: Any) -> None:
        def route(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            chosen = logits.topk(CHOSEN, dim=-1).indices
            self.own[self._row][:, number] = chosen.numpy()
            if self._row in self.choices:
                given = torch.from_numpy(self.choices[self._row][:, number])
                chosen = torch.where(given >= 0, given, chosen)
            weights = logits.gather(1, chosen).softmax(-1)  # normalised over the chosen
            return logits, weights, chosen

        gate.forward = route


def settings(replay: str, *, share_prefixes: bool = True) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "train_dtype": "float32",
            "lr": 2e-2,
            "max_tokens_per_microbatch": 25,
            "routing_replay": replay,
            "share_prefixes": share_prefixes,
            "clip_grad": 0.0,
        }
    )


def test_an_update_takes_the_experts_of_the_pass_for_the_old_logprobs(pool: RankPool, model: Path) -> None:
    batch = random_batch(1)
    trainer = pool.build(model, train=settings("trainer", share_prefixes=False), algorithm=ALGORITHM)
    metrics = resolve(trainer.train(batch, steps=2))
    first, second = trainer.steps()
    mini = mini_batches(batch, 2)[1]

    initial = RoutedReference(model)
    old = initial.frozen_logprobs(mini.samples)
    updated = RoutedReference(model, first.weights)
    without_replay = updated.gradients(mini, ALGORITHM, old=old, reference=None)
    updated.choices = initial.own
    expected = updated.gradients(mini, ALGORITHM, old=old, reference=None)
    gap, name = worst(second.gradients, expected)
    assert gap < BOUND, name
    gap, _ = worst(second.gradients, without_replay)
    assert gap > 100 * BOUND

    # Nothing is replayed in the first mini-batch: its weights are those of old.
    samples = [sample for sample in mini.samples if sample.loss_mask_T.any()]
    assert metrics["routing_agreement"] == pytest.approx(agreement(samples, initial, updated))
    assert metrics["routing_agreement"] < 0.98


def agreement(samples: Sequence[TrainSample], initial: RoutedReference, updated: RoutedReference) -> float:
    """The share of (computed token, layer) whose experts are the same in both."""
    equal: list[NDArray[np.bool_]] = []
    for sample in samples:
        row = sample.tokens_T.tobytes()
        computed = int(np.flatnonzero(sample.loss_mask_T)[-1])
        recorded = initial.own[row][:computed]
        own = updated.own[row][:computed]
        sets_are_equal = (np.sort(own, -1) == np.sort(recorded, -1)).all(-1)
        equal.append(np.delete(sets_are_equal, DENSE_LAYERS, axis=1).ravel())
    return float(np.concatenate(equal).mean())


LAYOUTS = {
    "pp2": (ParallelLayout(pipeline=2), {}),
    "pp2vpp2": (ParallelLayout(pipeline=2, virtual_pipeline=2), {}),
    "cp2": (ParallelLayout(context=2), {}),
    "dp2": (ParallelLayout(data=2), {}),
    "recompute": (ParallelLayout(), RECOMPUTE),
    "pp2 recompute": (ParallelLayout(pipeline=2), RECOMPUTE),
}


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Path) -> tuple[list[Arrays], float]:
    return updates(pool, model, ParallelLayout(), {})


def updates(
    pool: RankPool, model: Path, layout: ParallelLayout, megatron: dict[str, object]
) -> tuple[list[Arrays], float]:
    trainer = pool.build(
        model, layout=layout, train=settings("trainer"), algorithm=ALGORITHM, megatron=megatron | SMOOTH
    )
    metrics = resolve(trainer.train(random_batch(1), steps=2))
    return [step.gradients for step in trainer.steps()], metrics["routing_agreement"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_replays_what_one_process_does(
    pool: RankPool, model: Path, alone: tuple[list[Arrays], float], name: str
) -> None:
    layout, megatron = LAYOUTS[name]
    gradients, share = updates(pool, model, layout, megatron)
    for found, expected in zip(gradients, alone[0], strict=True):
        for tensor, values in expected.items():
            assert relative(found[tensor], values) < BOUND, tensor
    assert 0 < alone[1] < 0.98
    if layout.data == 1:  # ranks of several replicas compute shared prefixes again
        assert share == alone[1]
