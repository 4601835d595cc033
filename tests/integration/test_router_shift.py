"""RSPO's weight for routers that have moved, in the trainer, against Hugging Face's
model in float64, whose routers' logits are read under the old and the current
weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import make_family_model
from rank_pool import RankPool
from slow_cases import first_quick, named_quick
from train_reference import Arrays, Reference, random_batch, relative, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.errors import ConfigError
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainSample
from invrl.types.metrics import resolve

BOUND = 1e-5  # norm-relative, per tensor
LAYERS = 4
CHOSEN = 2
DENSE_LAYERS = (0, 2)
FLOOR = 0.8
RSPO = AlgorithmConfig(
    eps_clip_low=0.5,
    eps_clip_high=0.5,
    num_mini_batches=2,
    ratio_weight="invrl.contrib.router_shift:RouterShift",
    plugin={"RouterShift": {"floor": FLOOR}},
)
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SMOOTH = {"adam_eps": 1e-2}
"""With Adam's usual eps the first step is the sign of the gradient, which the last bit
decides."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("routed") / "model",
        "qwen3_moe",
        num_hidden_layers=LAYERS,
        num_experts=8,
        num_experts_per_tok=CHOSEN,
        mlp_only_layers=list(DENSE_LAYERS),
    )


@dataclass(frozen=True)
class Routed:
    """Of a row's tokens [T] in one layer."""

    chosen_TK: torch.Tensor
    shares_TE: torch.Tensor


class RoutingReference(Reference):
    """Notes what its routers do with a row. With `old`, its log-probs have the
    logarithm of the weight of each token added, without a gradient."""

    def __init__(
        self, path: Path, weights: Arrays | None = None, *, replays: bool = False
    ) -> None:
        super().__init__(path, weights)
        self.routed: dict[bytes, dict[int, Routed]] = {}
        """By the row's tokens, then by layer."""
        self.old: RoutingReference | None = None
        self.weights: list[float] = []
        self._replays = replays
        self._row = b""
        for number, layer in enumerate(self.model.model.layers):
            if hasattr(
                layer.mlp, "route_tokens_to_experts"
            ):  # a router with sigmoid scores
                self._listen(number, layer.mlp)
            elif hasattr(layer.mlp, "gate"):
                self._take_over(number, layer.mlp.gate)

    def logprobs(self, sample: TrainSample) -> torch.Tensor:
        self._row = sample.tokens_T.tobytes()
        self.routed[self._row] = {}
        logprobs_N = super().logprobs(sample)
        if self.old is None:
            return logprobs_N
        weights_N = self._weights(
            self.old.routed[self._row], self.routed[self._row], sample
        )
        self.weights += weights_N.tolist()
        return logprobs_N + torch.from_numpy(np.log(weights_N))

    def _weights(
        self, before: dict[int, Routed], now: dict[int, Routed], sample: TrainSample
    ) -> Any:
        weights: list[float] = []
        for position in np.flatnonzero(sample.loss_mask_T):
            at = position - 1  # the place that predicts the token
            of_layers: list[float] = []
            for layer, old in before.items():
                gaps = [
                    abs(
                        np.log(float(now[layer].shares_TE[at, e]))
                        - np.log(float(old.shares_TE[at, e]))
                    )
                    for e in old.chosen_TK[at].tolist()
                ]
                of_layers.append(sum(gaps) / len(gaps))
            weights.append(max(float(np.exp(-sum(of_layers) / len(of_layers))), FLOOR))
        return np.array(weights)

    def _take_over(self, number: int, gate: Any) -> None:
        def route(
            hidden: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            chosen = logits.topk(CHOSEN, dim=-1).indices
            if self._replays and self.old is not None:
                chosen = self.old.routed[self._row][number].chosen_TK
            shares = logits.detach().exp() / logits.detach().exp().sum(-1, keepdim=True)
            self.routed[self._row][number] = Routed(chosen, shares)
            # normalised over the chosen
            return logits, logits.gather(1, chosen).softmax(-1), chosen

        gate.forward = route

    def _listen(self, number: int, layer: Any) -> None:
        choose = layer.route_tokens_to_experts

        def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            chosen, weights = choose(logits)
            scores = 1.0 / (1.0 + (-logits.detach()).exp())
            self.routed[self._row][number] = Routed(
                chosen, scores / scores.sum(-1, keepdim=True)
            )
            return chosen, weights

        layer.route_tokens_to_experts = route


def settings(
    *, lr: float = 5e-3, replay: str = "none", share_prefixes: bool = True
) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "train_dtype": "float32",
            "lr": lr,
            "max_tokens_per_micro_batch": 25,
            "routing_replay": replay,
            "share_prefixes": share_prefixes,
            "clip_grad": None,
        }
    )


def trained(samples: Sequence[TrainSample]) -> int:
    return sum(int(sample.loss_mask_T.sum()) for sample in samples)


@pytest.fixture(scope="module")
def sigmoid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("sigmoid") / "model",
        "glm4_moe",
        num_hidden_layers=LAYERS,
    )


@pytest.mark.parametrize("replay", first_quick(["none", "trainer"]))
def test_tokens_are_weighted_by_the_shift_of_their_routers(
    pool: RankPool, model: Path, replay: str
) -> None:
    """Also where the experts of the old policy are replayed."""
    check_update(pool, model, replay)


def test_sigmoid_router_scores_count_as_shares_of_their_sum(
    pool: RankPool, sigmoid_model: Path
) -> None:
    """They are chosen by a bias and in groups, which are no part of the shares."""
    check_update(pool, sigmoid_model, "none", lr=1e-2)


def check_update(pool: RankPool, model: Path, replay: str, *, lr: float = 5e-3) -> None:
    batch = random_batch(1)
    # replay sends a shared prefix to the experts of its first row
    shares = replay == "none"
    trainer = pool.build(
        model,
        train=settings(lr=lr, replay=replay, share_prefixes=shares),
        algorithm=RSPO,
    )
    metrics = resolve(trainer.train(batch, steps=2))
    first, second = trainer.steps()
    before, mini = mini_batches(batch, 2)

    initial = RoutingReference(model)
    old = initial.frozen_logprobs(mini.samples)
    updated = RoutingReference(model, first.weights, replays=replay == "trainer")
    updated.old = initial
    expected = updated.gradients(mini, RSPO, old=old, reference=None)
    gap, name = worst(second.gradients, expected)
    assert gap < BOUND, name

    weights = updated.weights
    assert len(weights) == trained(mini.samples)
    num_floored = sum(weight == FLOOR for weight in weights)
    assert 0.1 < num_floored / len(weights) < 0.9
    # In the first mini-batch no router has moved.
    num_before = trained(before.samples)
    total = num_before + len(weights)
    assert metrics["router_weight_mean"] == pytest.approx(
        (num_before + sum(weights)) / total, rel=1e-6
    )
    assert metrics["router_weight_floored_fraction"] == pytest.approx(
        num_floored / total
    )

    unweighted = RoutingReference(model, first.weights)
    expected = unweighted.gradients(mini, RSPO, old=old, reference=None)
    gap, _ = worst(second.gradients, expected)
    assert gap > 1000 * BOUND


def test_router_weight_is_1_where_no_parameter_has_moved(
    pool: RankPool, model: Path
) -> None:
    trainer = pool.build(model, train=settings(lr=1e-30), algorithm=RSPO)
    metrics = resolve(trainer.train(random_batch(1), steps=2))
    assert metrics["optimizer_steps"] == 2
    assert metrics["router_weight_mean"] == 1.0
    assert metrics["router_weight_floored_fraction"] == 0.0


def test_pipeline_stages_are_refused_before_ranks_load_the_model(
    pool: RankPool, model: Path
) -> None:
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size"):
        pool.build(
            model,
            layout=ParallelLayout(pipeline=2),
            train=settings().model_copy(update={"pipeline_model_parallel_size": 2}),
            algorithm=RSPO,
        )


# ----------------------------------------------------------------- layouts


LAYOUTS = {
    "dp2": (ParallelLayout(data=2), {}),
    "tp2": (ParallelLayout(tensor=2), {}),
    "cp2": (ParallelLayout(context=2), {}),
    "tp2 ep2": (ParallelLayout(tensor=2, expert=2), {}),
    "ep2": (ParallelLayout(data=2, expert=2), {}),
    "recompute": (ParallelLayout(), RECOMPUTE),
}


@dataclass(frozen=True)
class Updates:
    gradients: list[Arrays]
    weight_mean: float
    floored_fraction: float


def updates(
    pool: RankPool, model: Path, layout: ParallelLayout, megatron: dict[str, object]
) -> Updates:
    """Of a batch in two mini-batches."""
    trainer = pool.build(
        model,
        layout=layout,
        train=settings(lr=1e-2),
        algorithm=RSPO,
        megatron=megatron | SMOOTH,
    )
    metrics = resolve(trainer.train(random_batch(1), steps=2))
    return Updates(
        gradients=[step.gradients for step in trainer.steps()],
        weight_mean=metrics["router_weight_mean"],
        floored_fraction=metrics["router_weight_floored_fraction"],
    )


@pytest.fixture(scope="module")
def alone(pool: RankPool, model: Path) -> Updates:
    """In one process."""
    return updates(pool, model, ParallelLayout(), {})


@pytest.mark.parametrize("name", named_quick(LAYOUTS.keys(), "tp2 ep2"))
def test_every_layout_computes_the_router_weights_of_one_process(
    pool: RankPool, model: Path, alone: Updates, name: str
) -> None:
    layout, megatron = LAYOUTS[name]
    found = updates(pool, model, layout, megatron)
    for found_step, expected_step in zip(found.gradients, alone.gradients, strict=True):
        for tensor, values in expected_step.items():
            assert relative(found_step[tensor], values) < BOUND, tensor
    assert alone.weight_mean < 0.97
    # about half of the tokens are of the second mini-batch
    assert 0.05 < alone.floored_fraction < 0.45
    assert found.weight_mean == pytest.approx(alone.weight_mean, rel=1e-5)
    assert found.floored_fraction == alone.floored_fraction
