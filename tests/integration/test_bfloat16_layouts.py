"""Layouts that compute in bfloat16: what rounding may change, and no more.

bfloat16 has 8 significant bits: a rounded result is off by at most u = 2**-8 of itself.
A gradient is what n operations in a row make, each of which rounds: those of n
independent errors of up to u together are up to u * sqrt(n). In a layer of Qwen3 a
value passes 13 of them (three norms, the projections before and after attention, the
rotary product, attention, the two projections of the MLP, activation and product, two
residual sums), and its gradient twice as many. A matrix product that tensor-parallel
ranks divide is rounded on each of two ranks and when their parts are added: two more,
in four products of a layer (two forward, two backward).

Two computations, one of which may be in float32, differ by the sum of their errors at
most. Stages of a pipeline make the same operations in the same order as one process, so
nothing differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool, Step, Trainer
from train_reference import random_batch, relative, worst

from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout

LAYERS = 2
ROUNDING = 2.0**-8
BOUND = 2 * ROUNDING * (LAYERS * (13 + 26 + 4 * 2)) ** 0.5
"""0.076, relative to the norm of a tensor."""
BATCH = random_batch(0, groups=2)
PROMPTS = [list(range(20, 50)), list(range(300, 340))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are numbers of bfloat16, so that float32 training begins with the
    same."""
    return make_family_model(
        tmp_path_factory.mktemp("model"),
        "qwen3",
        dtype="bfloat16",
        num_hidden_layers=LAYERS,
    )


def build(
    pool: RankPool, model: Path, layout: ParallelLayout, dtype: str = "bfloat16"
) -> Trainer:
    """The norm of the gradient is summed over ranks in another order, so nothing is
    clipped by it."""
    train = TrainConfig.model_validate(
        {
            "train_dtype": dtype,
            "max_tokens_per_micro_batch": 41,
            "clip_grad": None,
            "lr": 1e-3,
        }
    )
    return pool.build(model, layout=layout, train=train)


def computed(trainer: Trainer) -> tuple[list[NDArray], list[Step]]:
    """Log-probs of the prompts, then two optimizer steps."""
    logprobs = trainer.logprobs(PROMPTS)
    trainer.train(BATCH, steps=2)
    return logprobs, trainer.steps()


@pytest.mark.slow
def test_bfloat16_layouts_differ_from_one_process_only_by_rounding(
    pool: RankPool, model: Path
) -> None:
    exact_logprobs, [exact, _] = computed(
        build(pool, model, ParallelLayout(), "float32")
    )
    logprobs, steps = computed(build(pool, model, ParallelLayout()))

    found_logprobs, found = computed(build(pool, model, ParallelLayout(pipeline=2)))
    for found_T, expected_T in zip(found_logprobs, logprobs, strict=True):
        assert (found_T == expected_T).all()
    for found_step, step in zip(found, steps, strict=True):
        assert worst(found_step.gradients, step.gradients)[0] == 0.0
        assert worst(found_step.weights, step.weights)[0] == 0.0

    found_logprobs, [found_step, _] = computed(
        build(pool, model, ParallelLayout(tensor=2))
    )
    for others_logprobs, other in ((logprobs, steps[0]), (exact_logprobs, exact)):
        for found_T, expected_T in zip(found_logprobs, others_logprobs, strict=True):
            assert relative(found_T, expected_T) < BOUND
        gap, name = worst(found_step.gradients, other.gradients)
        print(f"{gap:.4f} of {BOUND:.4f}, {name}")
        assert gap < BOUND, name

    planted = build(pool, model, ParallelLayout(tensor=2))
    planted.each("leave_unreduced", "decoder.layers.1.input_layernorm.weight")
    _, [wrong, _] = computed(planted)
    gap, name = worst(wrong.gradients, steps[0].gradients)
    print(f"planted: {gap:.4f} of {BOUND:.4f}, {name}")
    assert gap > BOUND
    assert name == "model.layers.1.input_layernorm.weight"
