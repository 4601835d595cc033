"""The frozen reference: other weights in the one model, in every layout; and which
forward passes a step makes for old and reference log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from family_models import make_family_model
from rank_pool import RankPool, Trainer
from slow_cases import first_quick, named_quick
from train_reference import Reference, check_same_bits, random_batch, worst

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import KlConfig, ReferenceConfig
from invrl.errors import TrainError
from invrl.train.batches.micro_batch import token_sequences
from invrl.train.batches.packing import pack
from invrl.train.batches.sharding import mini_batches
from invrl.train.config import TrainConfig
from invrl.train.parallel_layout import ParallelLayout
from invrl.types.metrics import resolve
from invrl.types.weights import WeightVersion

BOUND = 1e-5  # norm-relative, per tensor
ALGORITHM = AlgorithmConfig(kl=KlConfig(coefficient=0.3, clamp=None))
BATCH = random_batch(1)
BATCHES = [
    replace(random_batch(number), version=WeightVersion(number)) for number in range(3)
]
"""One after the other, as a run has them."""
MAX_TOKENS = 25
PLACEMENTS = ("cpu", "cpu_by_layer", "device")
LAYOUTS = {
    "tp2": ParallelLayout(tensor=2),
    "dp2": ParallelLayout(data=2),
    "pp2": ParallelLayout(pipeline=2),
    "pp2vpp2": ParallelLayout(pipeline=2, virtual_pipeline=2),
}


def settings(**fields: object) -> TrainConfig:
    values: dict[str, object] = {
        "train_dtype": "float32",
        "lr": 5e-3,
        "max_tokens_per_micro_batch": MAX_TOKENS,
    }
    return TrainConfig.model_validate(values | fields)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family_model(
        tmp_path_factory.mktemp("policy"), "llama", num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same shape, near enough for a divergence that is not all in
    one token."""
    folder = tmp_path_factory.mktemp("other")
    return make_family_model(
        folder, "llama", num_hidden_layers=4, seed=1, initializer_range=0.05
    )


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose logits are small. Those of `policy` reach 9, so that any float32
    forward pass, also transformers', has log-probs that are off by 3e-6 in the mean
    square and 1e-5 at most. Here it is 3e-7, and every tensor's gradient is as much
    nearer to float64."""
    folder = tmp_path_factory.mktemp("even")
    return make_family_model(
        folder, "llama", num_hidden_layers=4, seed=2, initializer_range=0.05
    )


def train_checked(trainer: Trainer, policy: Path, other: Path) -> dict[str, float]:
    """Trains two mini-batches, whose gradients are those of the formula in float64.
    Returns the metrics."""
    metrics = resolve(trainer.train(BATCH, steps=2))
    initial = Reference(policy)
    reference = Reference(other)
    first, second = trainer.steps()
    for index, (mini_batch, step) in enumerate(
        zip(mini_batches(BATCH, 2), (first, second), strict=True)
    ):
        current = Reference(policy, first.weights) if index else initial
        expected = current.gradients(
            mini_batch,
            ALGORITHM,
            old=initial.frozen_logprobs(mini_batch.samples),
            reference=reference.frozen_logprobs(mini_batch.samples),
        )
        gap, name = worst(step.gradients, expected)
        assert gap < BOUND, f"step {index}: {name} is off by {gap:.1e}"
    return metrics


@pytest.mark.parametrize(
    ("family", "placement"),
    first_quick([("glm4_moe", "cpu_by_layer"), ("llama", "cpu"), ("llama", "device")]),
)
def test_reference_has_the_weights_of_its_model_folder(
    pool: RankPool, tmp_path: Path, family: str, placement: str
) -> None:
    """Experts have a router's bias, which is no parameter."""
    policy = make_family_model(tmp_path / "policy", family)
    other = make_family_model(
        tmp_path / "other", family, seed=1, initializer_range=0.05
    )
    train = settings(reference_placement=placement)
    trainer = pool.build(policy, train=train, algorithm=ALGORITHM, reference=other)
    metrics = train_checked(trainer, policy, other)
    assert metrics["kl_reference"] > 0.1


@pytest.mark.parametrize("layout", named_quick(LAYOUTS, "pp2"))
def test_reference_in_every_layout_equals_float64(
    pool: RankPool, policy: Path, other: Path, layout: ParallelLayout
) -> None:
    train = settings(reference_placement="cpu_by_layer")
    trainer = pool.build(
        policy, layout=layout, train=train, algorithm=ALGORITHM, reference=other
    )
    train_checked(trainer, policy, other)


def test_reference_keeps_the_initial_weights_and_a_failure_in_it_keeps_the_trained_weights(
    pool: RankPool, policy: Path
) -> None:
    """Without a folder of its own it has the weights that the run began with."""
    for placement in PLACEMENTS:
        train = settings(reference_placement=placement)
        trainer = pool.build(policy, train=train, algorithm=ALGORITHM)
        initial = trainer.weights()
        trainer.train(BATCH, steps=2)
        trained = trainer.weights()
        assert all((trained[name] != initial[name]).any() for name in initial)
        [during] = trainer.each("weights_in_reference")
        brought_in = {
            name for name in initial if np.array_equal(during[name], initial[name])
        }
        if placement == "cpu_by_layer":
            assert brought_in == {name for name in initial if ".layers." not in name}
        else:
            assert brought_in == initial.keys()
        [failed] = trainer.each("fail_in_reference", "decoder.layers.2")
        assert failed
        check_same_bits(trainer.weights(), trained)


@pytest.mark.parametrize("name", first_quick(["tp2", "one", "pp2vpp2"]))
def test_moving_reference_is_saved_and_loaded(
    pool: RankPool, policy: Path, tmp_path: Path, name: str
) -> None:
    """A moving average over two batches, and a coefficient on its way: a trainer that
    loads the checkpoint makes the same third step as the one that goes on."""
    algorithm = ALGORITHM.model_copy(
        update={
            "reference": ReferenceConfig(ema=0.75),
            "kl": KlConfig(coefficient=0.3),
            "adaptations": ("invrl.contrib.adaptive_kl:AdaptiveKL",),
        }
    ).with_plugin_table("AdaptiveKL", {"target": 0.01})
    layout = LAYOUTS.get(name, ParallelLayout())
    trainer = pool.build(policy, layout=layout, train=settings(), algorithm=algorithm)
    weights = [trainer.weights()]
    for batch in BATCHES[:2]:
        trainer.train(batch)
        weights.append(trainer.weights())
    for tensor, during in (
        trainer.each("weights_in_reference")[0].items() if name == "one" else ()
    ):
        first, second, third = (part[tensor] for part in weights)
        expected = 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third
        np.testing.assert_allclose(during, expected, rtol=1e-5, atol=1e-7)
    trainer.each("save", str(tmp_path / "checkpoint"))
    third = resolve(trainer.train(BATCHES[2]))
    after = trainer.weights()
    assert third["kl_coef"] != 0.3

    resumed = pool.build(policy, layout=layout, train=settings(), algorithm=algorithm)
    resumed.each("load", str(tmp_path / "checkpoint"))
    again = resolve(resumed.train(BATCHES[2]))
    for number in ("kl_reference", "kl_coef", "loss"):
        assert again[number] == pytest.approx(third[number], rel=1e-6)
    assert all(
        np.allclose(weight, after[key], rtol=1e-6)
        for key, weight in resumed.weights().items()
    )


def test_reference_is_reset_to_the_policy_after_the_set_number_of_batches(
    pool: RankPool, policy: Path, tmp_path: Path
) -> None:
    algorithm = ALGORITHM.model_copy(
        update={"reference": ReferenceConfig(reset_steps=2)}
    )
    trainer = pool.build(policy, train=settings(), algorithm=algorithm)
    initial = trainer.weights()
    trainer.train(BATCHES[0])
    [during] = trainer.each("weights_in_reference")
    check_same_bits(during, initial)
    trainer.train(BATCHES[1])
    after = trainer.weights()
    [during] = trainer.each("weights_in_reference")
    check_same_bits(during, after)
    assert any((after[key] != initial[key]).any() for key in after)
    frozen = pool.build(policy, train=settings(), algorithm=ALGORITHM)
    frozen.each("save", str(tmp_path / "frozen"))
    resumed = pool.build(policy, train=settings(), algorithm=algorithm)
    with pytest.raises(TrainError, match="holds no reference"):
        resumed.each("load", str(tmp_path / "frozen"))


def test_reference_is_loaded_only_if_the_objective_needs_it(
    pool: RankPool, policy: Path, tmp_path: Path
) -> None:
    pool.build(policy, train=settings(), reference=tmp_path / "none")
    with pytest.raises(Exception, match="none"):
        pool.build(
            policy, train=settings(), algorithm=ALGORITHM, reference=tmp_path / "none"
        )


def test_reference_of_another_shape_is_refused(
    pool: RankPool, policy: Path, tmp_path: Path
) -> None:
    """Also where nobody has looked at the folder before the rank was started."""
    wide = make_family_model(
        tmp_path / "wide", "llama", num_hidden_layers=4, intermediate_size=192
    )
    with pytest.raises(TrainError, match=r"gate_proj.*384, 64"):
        pool.build(policy, train=settings(), algorithm=ALGORITHM, reference=wide)


@pytest.mark.parametrize(
    ("fields", "steps", "has_old", "has_reference"),
    first_quick(
        [
            ({"kl": {"coefficient": 0.1}}, 2, True, True),
            ({"kl": {"coefficient": 0.1}}, 1, False, True),
            ({}, 1, False, False),
            ({}, 2, True, False),
            ({"old_logprobs": "engine"}, 2, False, False),
        ]
    ),
    ids=["two_steps_and_kl", "kl", "one_step", "two_steps", "engine"],
)
def test_only_forward_passes_that_the_objective_needs_are_made(
    pool: RankPool,
    policy: Path,
    fields: dict[str, object],
    steps: int,
    has_old: bool,
    has_reference: bool,
) -> None:
    """In the first mini-batch the current policy is the old one, so old is computed for
    the second alone."""
    algorithm = AlgorithmConfig.model_validate({"num_mini_batches": steps, **fields})
    trainer = pool.build(policy, train=settings(), algorithm=algorithm)
    parts = mini_batches(BATCH, steps)
    counts = [
        len(
            pack(
                token_sequences(part.samples),
                max_tokens=MAX_TOKENS,
                share_prefixes=True,
            )
        )
        for part in parts
    ]
    expected = sum(counts)
    if has_old:
        expected += counts[1]
    if has_reference:
        expected += sum(counts)
    assert trainer.call("forward_passes", [tuple(parts)]) == [expected]


@pytest.mark.slow
def test_reference_placed_by_layer_keeps_its_bfloat16_weights(
    pool: RankPool, tmp_path: Path
) -> None:
    """Under float32 training it takes half the memory of the weights, and computes the
    same."""
    model = make_family_model(
        tmp_path / "model",
        "llama",
        dtype="bfloat16",
        num_hidden_layers=8,
        hidden_size=256,
        intermediate_size=1024,
    )
    float32_bytes = 2 * (model / "model.safetensors").stat().st_size
    kept: dict[str, int] = {}
    divergence: dict[str, float] = {}
    for placement in ("cpu", "cpu_by_layer"):
        train = settings(reference_placement=placement)
        trainer = pool.build(model, train=train, algorithm=ALGORITHM)
        [kept[placement]] = trainer.each("reference_bytes")
        trainer.train(BATCH)
        divergence[placement] = resolve(trainer.train(BATCH))["kl_reference"]
    assert kept["cpu"] == pytest.approx(float32_bytes, rel=0.01)
    assert kept["cpu_by_layer"] == pytest.approx(float32_bytes / 2, rel=0.01)
    assert divergence["cpu"] == divergence["cpu_by_layer"] > 0


def test_optimizer_is_reset_with_the_reference(pool: RankPool, policy: Path) -> None:
    """The batch after a reset trains as the first batch of a new trainer does that has
    these weights."""
    algorithm = ALGORITHM.model_copy(
        update={"reference": ReferenceConfig(reset_steps=1, reset_optimizer=True)}
    )
    weights: dict[bool, list[dict[str, np.ndarray]]] = {}
    for resets in (True, False):
        update = {"reference": ReferenceConfig(reset_steps=1, reset_optimizer=resets)}
        trainer = pool.build(
            policy, train=settings(), algorithm=algorithm.model_copy(update=update)
        )
        weights[resets] = [trainer.weights()]
        for batch in BATCHES[:2]:
            trainer.train(batch)
            weights[resets].append(trainer.weights())
        [moments] = trainer.each("largest_moment")
        assert (moments == 0.0) == resets
    _, after_first, after_second = weights[True]
    largest: list[float] = []
    for name, first in after_first.items():
        assert np.array_equal(first, weights[False][1][name]), (
            "the reset comes after the batch's step"
        )
        largest.append(float(np.abs(after_second[name] - first).max()))
        assert (after_second[name] != weights[False][2][name]).any()
    # Adam's first step moves no weight further than the learning rate (and its decay,
    # which is 0 here).
    assert max(largest) <= settings().lr * (1 + 1e-4)


@pytest.mark.parametrize(
    "layout",
    first_quick([ParallelLayout(data=2), ParallelLayout()]),
    ids=["dp2", "one"],
)
def test_rloo_advantages_compare_rewards_that_include_the_kl_of_whole_rollouts(
    pool: RankPool, even: Path, other: Path, layout: ParallelLayout
) -> None:
    """RLOO: in both mini-batches the advantages are those of r - kl_coef KL, by the
    formula in float64. A group's rollouts are on both ranks, and some have two rows."""
    coef = 1.0
    algorithm = AlgorithmConfig(
        advantage="rloo",
        kl=KlConfig(
            coefficient=coef, estimator="k1", added_to="rollout_reward", clamp=None
        ),
    )
    trainer = pool.build(
        even, layout=layout, train=settings(), algorithm=algorithm, reference=other
    )
    metrics = resolve(trainer.train(BATCH, steps=2))
    initial = Reference(even)
    old = initial.frozen_logprobs(BATCH.samples)
    reference = Reference(other).frozen_logprobs(BATCH.samples)
    kl: dict[str, dict[str, float]] = {}
    for sample, old_N, reference_N in zip(BATCH.samples, old, reference, strict=True):
        if sample.loss_mask_T.any():
            of_group = kl.setdefault(sample.group_id, {})
            of_row = float((old_N - reference_N).sum())
            of_group[sample.rollout_id] = of_group.get(sample.rollout_id, 0.0) + of_row
    advantages = []
    for sample, given_T in zip(BATCH.samples, BATCH.advantages, strict=True):
        of_group = kl.get(sample.group_id, {})
        added = 0.0
        if sample.rollout_id in of_group and len(of_group) > 1:
            others = [
                value for name, value in of_group.items() if name != sample.rollout_id
            ]
            added = -coef * (of_group[sample.rollout_id] - sum(others) / len(others))
        advantages.append((given_T + added * sample.loss_mask_T).astype(np.float32))
    with_kl = replace(BATCH, advantages=tuple(advantages))
    tokens = sum(int(sample.loss_mask_T.sum()) for sample in BATCH.samples)
    assert metrics["kl_in_reward"] == pytest.approx(
        sum(sum(of.values()) for of in kl.values()) / tokens
    )
    plain = AlgorithmConfig()
    steps = trainer.steps()
    for index, (mini_batch, step) in enumerate(
        zip(mini_batches(with_kl, 2), steps, strict=True)
    ):
        current = initial if index == 0 else Reference(even, steps[0].weights)
        frozen = initial.frozen_logprobs(mini_batch.samples)
        expected = current.gradients(mini_batch, plain, old=frozen, reference=None)
        gap, name = worst(step.gradients, expected)
        assert gap < BOUND, f"step {index}: {name} is off by {gap:.1e}"
