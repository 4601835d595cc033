"""The experts of a layer computed together, against Megatron's module that computes
them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import make_family_model
from numpy.typing import NDArray
from rank_pool import RankPool, Step, Trainer
from safetensors.torch import load_file, save_file
from slow_cases import first_quick
from train_reference import random_batch, worst

from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout

EXPERTS = 8
LAYERS = 3
"""Of which the first has no experts."""
ONE = ParallelLayout()
EP2 = ParallelLayout(data=2, expert=2)
TP2_EP2 = ParallelLayout(tensor=2, expert=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("glm") / "model",
        "glm4_moe",
        dtype="bfloat16",
        num_hidden_layers=LAYERS,
    )


@pytest.fixture(scope="module")
def one_sided(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose routers choose among the first half of the experts only."""
    folder = tmp_path_factory.mktemp("one_sided")
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    for layer in range(1, LAYERS):
        bias_E = tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        bias_E += 100.0 * (torch.arange(EXPERTS) < EXPERTS // 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def not_aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 200 bytes in float32, 100 in bfloat16: torch multiplies those of
    multiples of 16 in groups."""
    folder = tmp_path_factory.mktemp("not_aligned") / "model"
    return make_family_model(
        folder,
        "glm4_moe",
        dtype="bfloat16",
        num_hidden_layers=LAYERS,
        moe_intermediate_size=50,
    )


def build(
    pool: RankPool, model: Path, layout: ParallelLayout, **fields: Any
) -> Trainer:
    train = TrainConfig.model_validate(
        {"max_tokens_per_micro_batch": 41, "lr": 1e-3, **fields}
    )
    return pool.build(model, layout=layout, train=train)


def computed(trainer: Trainer) -> tuple[list[NDArray], list[Step]]:
    """Log-probs, then two optimizer steps."""
    batch = random_batch(0, groups=2)
    logprobs = trainer.token_logprobs(batch)
    trainer.train(batch, steps=2)
    return logprobs, trainer.steps()


@pytest.mark.parametrize("dtype", first_quick(["bfloat16", "float32"]))
@pytest.mark.parametrize(
    ("routing", "layout"),
    [
        pytest.param("model", ONE, id="one"),
        pytest.param("model", TP2_EP2, id="tp2ep2", marks=pytest.mark.slow),
        pytest.param(
            "one_sided", ONE, id="half of the experts unused", marks=pytest.mark.slow
        ),
        pytest.param("one_sided", EP2, id="a rank without tokens"),
        pytest.param("not_aligned", ONE, id="not aligned"),
    ],
)
def test_experts_computed_together_equal_experts_computed_one_by_one(
    pool: RankPool,
    request: pytest.FixtureRequest,
    routing: str,
    layout: ParallelLayout,
    dtype: str,
) -> None:
    """Bit for bit: on a CPU the products are the same, and so is all that is between
    them."""
    folder = request.getfixturevalue(routing)
    one_by_one = build(pool, folder, layout, train_dtype=dtype)
    one_by_one.each("compute_experts_one_by_one")
    expected_logprobs, expected = computed(one_by_one)
    logprobs, found = computed(build(pool, folder, layout, train_dtype=dtype))

    for found_T, expected_T in zip(logprobs, expected_logprobs, strict=True):
        assert (found_T == expected_T).all()
    for found_step, expected_step in zip(found, expected, strict=True):
        assert worst(found_step.gradients, expected_step.gradients)[0] == 0.0
        assert worst(found_step.weights, expected_step.weights)[0] == 0.0
    last_expert = found[0].gradients[
        f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"
    ]
    assert last_expert.any() == (routing != "one_sided")


@pytest.mark.parametrize("layout", first_quick([EP2, ONE]), ids=["ep2", "one"])
@pytest.mark.parametrize("sharded", [True, False])
def test_expert_weights_of_the_distributed_optimizer_are_not_copied(
    pool: RankPool, model: Path, layout: ParallelLayout, sharded: bool
) -> None:
    """In its memory the weights of experts lie in order. Without it they are where
    torch has put them."""
    trainer = build(pool, model, layout, use_distributed_optimizer=sharded)
    for copied in trainer.each("copied_stacks"):
        assert copied == [not sharded] * 2 * (LAYERS - 1)
