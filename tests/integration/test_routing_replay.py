"""Routing replay in the trainer, against Hugging Face's model in float64 whose routers
are given the same experts: those of an earlier pass of the trainer, and those that the
engine recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool
from slow_cases import first_quick, named_quick
from train_reference import Arrays, Reference, random_batch, relative, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import TrainError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
LAYERS = 4
EXPERTS = 8
CHOSEN = 2
DENSE_LAYERS = (0, 2)
ROUTED_LAYERS = [1, 3]
UNKNOWN = 255
ALGORITHM = AlgorithmConfig(eps_clip_low=0.1, eps_clip_high=0.15)
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SMOOTH = {"adam_eps": 1e-2}
"""With Adam's usual eps the first step is the sign of the gradient, which the last bit
decides."""

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
    """Its routers take the experts that `choices` holds for the row, and note what they
    would have chosen."""

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
        def route(
            hidden: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
            "max_tokens_per_micro_batch": 25,
            "routing_replay": replay,
            "share_prefixes": share_prefixes,
            "clip_grad": None,
        }
    )


def test_replay_uses_the_experts_of_the_old_logprob_pass(
    pool: RankPool, model: Path
) -> None:
    batch = random_batch(1)
    trainer = pool.build(
        model, train=settings("trainer", share_prefixes=False), algorithm=ALGORITHM
    )
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
    assert metrics["routing_agreement"] == pytest.approx(
        agreement(samples, initial, updated)
    )
    assert metrics["routing_agreement"] < 0.98


def agreement(
    samples: Sequence[TrainSample], initial: RoutedReference, updated: RoutedReference
) -> float:
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


# --------------------------------------------------------------- the engine's experts


def recorded_batch(
    seed: int, *, layer_order: Sequence[int] = range(LAYERS)
) -> TrainBatch:
    """As `random_batch`, with experts as an engine may have recorded them: equal after
    equal tokens, zeros in dense layers, unknown for a third of the tokens.
    `layer_order`: the layers in whose place each is put."""
    batch = random_batch(seed)
    samples: list[TrainSample] = []
    for sample in batch.samples:
        experts_TLK = np.zeros((len(sample.tokens_T), LAYERS, CHOSEN), np.uint8)
        for position in range(len(sample.tokens_T)):
            rng = np.random.default_rng(
                sample.tokens_T[: position + 1].astype(np.int64).tolist()
            )
            if rng.random() < 1 / 3:
                experts_TLK[position] = UNKNOWN
                continue
            for layer in ROUTED_LAYERS:
                experts_TLK[position, layer] = rng.permutation(EXPERTS)[:CHOSEN]
        samples.append(replace(sample, experts_TLK=experts_TLK[:, list(layer_order)]))
    return replace(batch, samples=tuple(samples))


def choices(sample: TrainSample) -> Choices:
    assert sample.experts_TLK is not None
    given = sample.experts_TLK.astype(np.int64)
    return np.where(given == UNKNOWN, -1, given)


def test_replay_uses_the_experts_of_the_engine(pool: RankPool, model: Path) -> None:
    """Also in the pass for the old log-probs, and not in the reference's. Where they
    are unknown the router chooses. With two layers in each other's place the gradient
    is another one."""
    algorithm = AlgorithmConfig(
        eps_clip_low=0.1, eps_clip_high=0.15, kl={"coefficient": 0.1}
    )
    batch = recorded_batch(1)
    trainer = pool.build(model, train=settings("engine"), algorithm=algorithm)
    metrics = resolve(trainer.train(batch, steps=2))
    assert 0.25 < metrics["routing_unknown"] < 0.4
    assert metrics["routing_agreement"] < 0.2  # random experts are seldom the router's
    first, second = trainer.steps()

    initial = RoutedReference(model)
    for index, (mini, step) in enumerate(
        zip(mini_batches(batch, 2), (first, second), strict=True)
    ):
        initial.choices = {}
        reference = initial.frozen_logprobs(mini.samples)
        initial.choices = {
            sample.tokens_T.tobytes(): choices(sample) for sample in mini.samples
        }
        old = initial.frozen_logprobs(mini.samples)
        policy = (
            RoutedReference(model, first.weights) if index else RoutedReference(model)
        )
        policy.choices = initial.choices
        expected = policy.gradients(mini, algorithm, old=old, reference=reference)
        gap, name = worst(step.gradients, expected)
        assert gap < BOUND, f"step {index}: {name}"

    swapped = recorded_batch(1, layer_order=[0, 3, 2, 1])
    trainer = pool.build(model, train=settings("engine"), algorithm=algorithm)
    trainer.train(swapped, steps=2)
    gap, _ = worst(
        trainer.steps()[0].gradients,
        {n: torch.from_numpy(g) for n, g in first.gradients.items()},
    )
    assert gap > 100 * BOUND


def test_recorded_experts_of_another_model_are_refused(
    pool: RankPool, model: Path
) -> None:
    batch = recorded_batch(1)
    trainer = pool.build(model, train=settings("engine"))
    fewer_layers = [
        replace(sample, experts_TLK=sample.experts_TLK[:, 1:])
        for sample in batch.samples
        if sample.experts_TLK is not None
    ]
    with pytest.raises(
        TrainError, match="in each of 3 layers, where this one has 2 of 8 in each of 4"
    ):
        trainer.train(replace(batch, samples=tuple(fewer_layers)))
    too_many = [
        replace(sample, experts_TLK=np.full_like(sample.experts_TLK, 8))
        for sample in batch.samples
    ]
    with pytest.raises(TrainError, match="2 of at least 9 in each"):
        trainer.train(replace(batch, samples=tuple(too_many)))


# ----------------------------------------------------------------- layouts


LAYOUTS = {
    "pp2": (ParallelLayout(pipeline=2), {}),
    "pp2vpp2": (ParallelLayout(pipeline=2, virtual_pipeline=2), {}),
    "cp2": (ParallelLayout(context=2), {}),
    "tp2": (ParallelLayout(tensor=2), {}),
    "tp2 ep2": (ParallelLayout(tensor=2, expert=2), {}),
    "ep2": (ParallelLayout(data=2, expert=2), {}),
    "pp2 ep2": (ParallelLayout(pipeline=2, data=2, expert=2), {}),
    "dp2": (ParallelLayout(data=2), {}),
    "recompute": (ParallelLayout(), RECOMPUTE),
    "pp2 recompute": (ParallelLayout(pipeline=2), RECOMPUTE),
}


@dataclass(frozen=True)
class Updates:
    gradients: list[Arrays]
    agreement: float


def updates(
    pool: RankPool,
    model: Path,
    replay: str,
    layout: ParallelLayout,
    megatron: dict[str, object],
) -> Updates:
    """Of a batch in two mini-batches."""
    trainer = pool.build(
        model,
        layout=layout,
        train=settings(replay),
        algorithm=ALGORITHM,
        megatron=megatron | SMOOTH,
    )
    metrics = resolve(trainer.train(recorded_batch(1), steps=2))
    gradients = [step.gradients for step in trainer.steps()]
    return Updates(gradients=gradients, agreement=metrics["routing_agreement"])


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Path) -> dict[str, Updates]:
    """In one process, by the setting."""
    return {
        replay: updates(pool, model, replay, ParallelLayout(), {})
        for replay in ("trainer", "engine")
    }


@pytest.mark.parametrize("replay", first_quick(["engine", "trainer"]))
@pytest.mark.parametrize("name", named_quick(LAYOUTS.keys(), "pp2 ep2"))
def test_every_layout_replays_experts_as_one_process_does(
    pool: RankPool, model: Path, alone: dict[str, Updates], name: str, replay: str
) -> None:
    layout, megatron = LAYOUTS[name]
    found = updates(pool, model, replay, layout, megatron)
    expected = alone[replay]
    for found_step, expected_step in zip(
        found.gradients, expected.gradients, strict=True
    ):
        for tensor, values in expected_step.items():
            assert relative(found_step[tensor], values) < BOUND, tensor
    assert 0 < expected.agreement < 0.98
    if layout.data == 1:  # ranks of several replicas compute shared prefixes again
        assert found.agreement == expected.agreement
