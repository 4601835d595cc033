"""How tokens are spread over experts, and the bias of the router that balances them:
against transformers' model in float64, one row at a time, with the papers' formulas
written out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool, Trainer
from safetensors.torch import load_file
from slow_cases import first_quick
from train_reference import Reference, random_batch

from invrl.families.hf_config import read_hf_config
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.batches import TrainBatch
from invrl.types.metrics import resolve

RATE = 0.004
BALANCED = TrainConfig(
    train_dtype="float32",
    lr=1e-3,
    max_tokens_per_micro_batch=41,
    moe_router_bias_update_rate=RATE,
)
BATCHES = [random_batch(seed, groups=2) for seed in range(3)]
NO_ADVANTAGE = replace(
    BATCHES[0],
    advantages=tuple(np.zeros_like(values_T) for values_T in BATCHES[0].advantages),
)
NOT_FINITE = replace(
    BATCHES[0],
    advantages=tuple(
        np.full_like(values_T, np.nan) for values_T in BATCHES[0].advantages
    ),
)
LAYERS = 4
"""Of which the first has no experts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("glm") / "model", "glm4_moe", num_hidden_layers=LAYERS
    )


def exported(trainer: Trainer, folder: Path) -> Path:
    trainer.part(trainer.layout.model_copy(0)).each("export", str(folder))
    return folder


def biases(folder: Path) -> NDArray[np.float32]:
    """[L, E]"""
    tensors = load_file(folder / "model.safetensors")
    names = [
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        for layer in range(1, LAYERS)
    ]
    assert all(tensors[name].dtype == torch.float32 for name in names)
    return np.stack([tensors[name].numpy() for name in names])


def expected_load(
    folder: Path, batch: TrainBatch
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Tokens of each expert [L, E], and the mean entropy [L]: of every row that trains
    something, up to the last token that is not only predicted."""
    config = read_hf_config(folder)
    experts = config.experts
    assert experts is not None
    reference = Reference(folder)
    logits: dict[int, list[NDArray[np.float64]]] = {}
    for layer in range(1, LAYERS):
        gate = reference.model.model.layers[layer].mlp.gate
        found = logits.setdefault(layer, [])
        gate.register_forward_hook(
            lambda _gate, _in, out, found=found: found.append(out.double().numpy())
        )
    with torch.no_grad():
        for sample in batch.samples:
            wanted = np.flatnonzero(sample.loss_mask_T)
            if len(wanted):
                reference.model(
                    torch.from_numpy(sample.tokens_T[: wanted[-1]].astype(np.int64))[
                        None
                    ]
                )
    bias_LE = biases(folder)
    tokens_LE = np.zeros((LAYERS - 1, experts.count))
    entropy_L = np.zeros(LAYERS - 1)
    for place in range(LAYERS - 1):
        scores_TE = 1 / (1 + np.exp(-np.concatenate(logits[place + 1])))
        shares_TE = scores_TE / scores_TE.sum(1, keepdims=True)
        entropy_L[place] = -(shares_TE * np.log(shares_TE)).sum(1).mean()
        for scores_E in scores_TE + bias_LE[place]:
            groups = scores_E.reshape(experts.groups, -1)
            best_two = np.sort(groups, axis=1)[:, -2:].sum(1)
            allowed = np.argsort(best_two)[-experts.chosen_groups :]
            is_allowed = np.isin(np.arange(experts.groups), allowed).repeat(
                groups.shape[1]
            )
            chosen = np.argsort(np.where(is_allowed, scores_E, -np.inf))[
                -experts.chosen :
            ]
            tokens_LE[place, chosen] += 1
    return tokens_LE, entropy_L


def test_router_biases_move_against_the_load_of_their_experts(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    """Up where an expert had fewer tokens than the mean, down where it had more
    (algorithm 1 of the paper). The numbers are those of rows that share no prefix and
    no micro-batch."""
    trainer = pool.build(model, train=BALANCED)
    folder = model
    for number, batch in enumerate(BATCHES):
        tokens_LE, entropy_L = expected_load(folder, batch)
        metrics = resolve(trainer.train(batch))
        relative_LE = tokens_LE / tokens_LE.mean(1, keepdims=True)
        expected = {
            "expert_load_max": relative_LE.max(1).mean(),
            "expert_load_max_of_layers": relative_LE.max(),
            "expert_load_min": relative_LE.min(1).mean(),
            "expert_load_min_of_layers": relative_LE.min(),
            "dead_experts": (tokens_LE == 0).mean(),
            "router_entropy": entropy_L.mean(),
            "router_entropy_min_of_layers": entropy_L.min(),
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(
            expected, rel=1e-5
        )
        assert relative_LE.max() > 1.2
        before = biases(folder)
        folder = exported(trainer, tmp_path / str(number))
        direction_LE = np.where(tokens_LE < tokens_LE.mean(1, keepdims=True), 1.0, -1.0)
        direction_LE[tokens_LE == tokens_LE.mean(1, keepdims=True)] = 0.0
        np.testing.assert_allclose(
            biases(folder), before + RATE * direction_LE, rtol=0, atol=1e-7
        )


def test_bias_updates_balance_the_experts_after_some_steps(
    pool: RankPool, model: Path
) -> None:
    """With weights that hardly move the same batch is spread more evenly after each
    step."""
    trainer = pool.build(
        model,
        train=BALANCED.model_copy(
            update={"lr": 1e-12, "moe_router_bias_update_rate": 0.02}
        ),
    )
    loads = [resolve(trainer.train(BATCHES[0])) for _ in range(12)]
    excess = [load["expert_load_max_of_layers"] - 1 for load in loads]
    assert excess[-1] < 0.5 * excess[0]
    assert loads[-1]["expert_load_min"] > loads[0]["expert_load_min"]


@pytest.mark.parametrize(
    "layout",
    first_quick(
        [
            ParallelLayout(data=2, expert=2),
            ParallelLayout(data=2),
            ParallelLayout(tensor=2),
            ParallelLayout(context=2),
            ParallelLayout(pipeline=2),
            ParallelLayout(pipeline=2, virtual_pipeline=2),
        ]
    ),
    ids=["ep2", "dp2", "tp2", "cp2", "pp2", "pp2vpp2"],
)
def test_every_layout_balances_experts_as_one_process_does(
    pool: RankPool, model: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """Over several mini-batches, with rows that ranks divide between them."""

    def run(
        trainer: Trainer, folder: Path
    ) -> tuple[list[dict[str, float]], NDArray[np.float32]]:
        numbers = [resolve(trainer.train(batch, steps=2)) for batch in BATCHES]
        return numbers, biases(exported(trainer, folder))

    expected_numbers, expected_biases = run(
        pool.build(model, train=BALANCED), tmp_path / "one"
    )
    found_numbers, found_biases = run(
        pool.build(model, layout=layout, train=BALANCED), tmp_path / "many"
    )
    assert (found_biases == expected_biases).all()
    for found, expected in zip(found_numbers, expected_numbers, strict=True):
        names = [name for name in expected if "expert" in name or "router" in name]
        assert len(names) == 7
        assert {name: found[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5
        )


@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))
def test_resume_restores_the_router_bias(
    pool: RankPool, model: Path, tmp_path: Path, dtype: Any
) -> None:
    """It is float32 in a model of any dtype. A step that is skipped leaves it alone."""
    train = BALANCED.model_copy(update={"train_dtype": dtype})
    trainer = pool.build(model, train=train)
    trainer.train(BATCHES[0])
    first = biases(exported(trainer, tmp_path / "first"))
    assert {
        round(float(step), 7) for step in np.abs(first - biases(model)).ravel()
    } <= {0.0, RATE}
    assert (first != biases(model)).any()
    assert resolve(trainer.train(NO_ADVANTAGE))["skipped_steps"] == 1
    assert resolve(trainer.train(NOT_FINITE))["nonfinite_steps"] == 1
    trainer.each("save", str(tmp_path / "saved"))
    resumed = pool.build(model, train=train)
    resumed.each("load", str(tmp_path / "saved"))
    assert (biases(exported(resumed, tmp_path / "loaded")) == first).all()


def test_biases_stay_without_an_update_rate(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    trainer = pool.build(
        model, train=BALANCED.model_copy(update={"moe_router_bias_update_rate": None})
    )
    assert "router_entropy" in resolve(trainer.train(BATCHES[0]))
    assert (biases(exported(trainer, tmp_path / "after")) == biases(model)).all()
