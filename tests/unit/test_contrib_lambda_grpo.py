"""lambda-GRPO's weights of rollouts by their lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples_example import row_of_turns

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.policy_loss.axis_plugins import load_sample_weight
from invrl.contrib.lambda_grpo import (
    LAMBDA_GRADIENT,
    LENGTH_SLOPE,
    LENGTH_WEIGHT,
    LearnedExponent,
    LengthWeight,
    group_weights,
    largest_scale,
)
from invrl.types.batches import TrainedCounts, TrainSample

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
exponents = st.floats(-6, 6)


def of_lengths(
    values: list[int],
    exponent: float,
    scale: float = 1 / 9,
) -> list[float]:
    lengths_G = np.array(values, np.float64)
    weights_G, _ = group_weights(lengths_G, exponent, scale)
    return weights_G.tolist()


def by_loops(
    values: list[int],
    exponent: float,
    scale: float,
) -> list[float]:
    """The paper's formula."""
    size = len(values)
    mean = math.fsum(values) / size
    distances = [value - mean for value in values]
    deviation = 0.0
    if size > 1:
        squares = math.fsum(distance**2 for distance in distances)
        deviation = math.sqrt(squares / (size - 1))
    exponentials: list[float] = []
    for distance in distances:
        base = 1 + scale * distance / (deviation + 1e-8)
        exponentials.append(math.exp(base**exponent))
    total = math.fsum(exponentials)
    return [size * exponential / total for exponential in exponentials]


@settings(max_examples=300, deadline=None)
@given(
    values=lengths,
    exponent=exponents,
    scale=st.sampled_from([0.01, 1 / 9, 0.29]),
)
def test_length_weights_and_their_slopes_equal_the_formula(
    values: list[int],
    exponent: float,
    scale: float,
) -> None:
    lengths_G = np.array(values, np.float64)
    weights_G, slopes_G = group_weights(lengths_G, exponent, scale)
    expected = by_loops(values, exponent, scale)
    assert weights_G.tolist() == pytest.approx(expected, rel=1e-11)
    assert weights_G.mean() == pytest.approx(1.0, rel=1e-13)
    above = by_loops(values, exponent + 1e-5, scale)
    below = by_loops(values, exponent - 1e-5, scale)
    differences_G = (np.array(above) - np.array(below)) / 2e-5
    assert slopes_G.tolist() == pytest.approx(
        differences_G.tolist(),
        rel=1e-6,
        abs=1e-8,
    )


@pytest.mark.parametrize(
    ("exponent", "weights"),
    [
        (1.0, [0.875, 0.953, 1.039, 1.133]),
        (-1.0, [1.143, 1.031, 0.946, 0.879]),
    ],
)
def test_length_weights_of_known_lengths(
    exponent: float,
    weights: list[float],
) -> None:
    found = of_lengths([10, 20, 30, 40], exponent)
    assert found == pytest.approx(weights, abs=5e-4)


@settings(max_examples=200, deadline=None)
@given(values=lengths)
def test_lambda_0_weighs_all_rollouts_equally(values: list[int]) -> None:
    assert of_lengths(values, 0.0) == [1.0] * len(values)


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 5000),
    size=st.integers(1, 100),
    exponent=exponents,
)
def test_rollouts_of_equal_length_have_equal_weights(
    length: int,
    size: int,
    exponent: float,
) -> None:
    weights = of_lengths([length] * size, exponent)
    assert weights == pytest.approx([1.0] * size, rel=1e-14)


@settings(max_examples=200, deadline=None)
@given(
    values=lengths,
    exponent=st.floats(0.01, 6),
    data=st.data(),
)
def test_sign_of_lambda_prefers_long_or_short_rollouts(
    values: list[int],
    exponent: float,
    data: st.DataObject,
) -> None:
    ascending = sorted(values)
    rising = of_lengths(ascending, exponent)
    falling = of_lengths(ascending, -exponent)
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    permuted = data.draw(st.permutations(ascending))
    weight_by_length = dict(zip(ascending, rising, strict=True))
    expected = [weight_by_length[length] for length in permuted]
    assert of_lengths(permuted, exponent) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("exponent", [-100.0, -7.0, 7.0, 100.0])
@pytest.mark.parametrize("scale", [1 / 9, 5.0])
def test_length_weights_are_finite_for_any_lambda_and_lengths(
    exponent: float, scale: float
) -> None:
    """Also where 1 + r z is below 0."""
    lengths_G = np.full(21, 10_000.0)
    lengths_G[0] = 1.0
    weights_G, slopes_G = group_weights(lengths_G, exponent, scale)
    assert np.isfinite(weights_G).all()
    assert np.isfinite(slopes_G).all()
    assert weights_G.mean() == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 3, 16, 82, 83, 1000])
def test_largest_scale_gives_a_lone_short_rollout_weight_0(size: int) -> None:
    lengths_G = np.full(size, 500.0)
    lengths_G[0] = 1.0
    distance = lengths_G[0] - lengths_G.mean()
    z_score = distance / lengths_G.std(ddof=1)
    base = 1 + largest_scale(size) * z_score
    assert base == pytest.approx(0.0, abs=1e-12)


# ----------------------------------------------------------------- rows


def row(
    group: str,
    rollout: str,
    num_tokens: int,
    *,
    is_trained: bool = True,
) -> TrainSample:
    sample = row_of_turns(("t", 3, num_tokens, is_trained))
    return replace(
        sample,
        group_id=group,
        rollout_id=rollout,
    )


def test_length_of_a_rollout_is_over_all_its_samples() -> None:
    samples = [
        row("a", "a0", 10),
        row("b", "b0", 7),
        row("a", "a1", 15),
        row("a", "a0", 20),
        row("a", "masked", 999, is_trained=False),
        row("a", "a1", 50, is_trained=False),
        row("a", "a2", 45),
    ]
    weight = LengthWeight(exponent=2.0, scale=0.3)
    numbers = weight.numbers(TrainedCounts.of(samples))
    assert set(numbers) == {"a0", "a1", "a2", "b0"}
    weights = [
        numbers["a0"][LENGTH_WEIGHT],
        numbers["a1"][LENGTH_WEIGHT],
        numbers["a2"][LENGTH_WEIGHT],
    ]
    expected = by_loops([30, 15, 45], 2.0, 0.3)
    assert weights == pytest.approx(expected, rel=1e-12)
    assert numbers["b0"] == {LENGTH_WEIGHT: 1.0, LENGTH_SLOPE: 0.0}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_order_of_samples_does_not_change_length_weights(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for number in range(12):
        group = f"g{number % 3}"
        rollout = f"{group}r{rng.integers(3)}"
        num_tokens = int(rng.integers(1, 30))
        samples.append(row(group, rollout, num_tokens))
    weight = LengthWeight(exponent=-1.5, scale=0.4)
    numbers = weight.numbers(TrainedCounts.of(samples))
    permuted = [samples[place] for place in rng.permutation(12)]
    numbers_of_permuted = weight.numbers(TrainedCounts.of(permuted))
    assert numbers_of_permuted.keys() == numbers.keys()
    for rollout_id, numbers_of_rollout in numbers.items():
        assert numbers_of_permuted[rollout_id] == pytest.approx(
            numbers_of_rollout,
            rel=1e-12,
            abs=1e-15,
        )


def test_exponent_follows_only_its_own_gradient() -> None:
    config = AlgorithmConfig(
        sample_weight="invrl.contrib.lambda_grpo:LengthWeight",
        plugin={"LengthWeight": {"exponent": 0.5, "scale": 0.2}},
    )
    learned = LearnedExponent(lr=0.1)
    state = learned(learned.start(config), {LAMBDA_GRADIENT: 2.0})
    assert state == {"length_lambda": pytest.approx(0.3)}
    within = learned.within(config, {"length_lambda": 0.25})
    assert within == config.with_plugin_table("LengthWeight", {"exponent": 0.25})
    assert within.plugin.by_name == {"LengthWeight": {"exponent": 0.25, "scale": 0.2}}


def test_learned_exponent_may_leave_the_bounds_of_the_setting() -> None:
    """A run does not end because the loss drives it far."""
    config = AlgorithmConfig(sample_weight="invrl.contrib.lambda_grpo:LengthWeight")
    within = LearnedExponent(lr=1.0).within(config, {"length_lambda": -123.0})
    weight = load_sample_weight(within)
    assert isinstance(weight, LengthWeight)
    assert weight.exponent == -123.0
