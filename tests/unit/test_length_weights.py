"""lambda-GRPO's weights of rollouts by their lengths."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_samples_example import row_of_turns

from invrl.algorithms.length_weights import (
    LENGTH_SLOPE,
    LENGTH_WEIGHT,
    group_weights,
    largest_scale,
    length_numbers,
)
from invrl.types.batches import TrainedCounts, TrainSample

lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=12)
exponents = st.floats(-6, 6)


def of_lengths(values: list[int], exponent: float, scale: float = 1 / 9) -> list[float]:
    weights_G, _ = group_weights(np.array(values, np.float64), exponent, scale)
    return weights_G.tolist()


def by_loops(values: list[int], exponent: float, scale: float) -> list[float]:
    """The paper's formula."""
    size = len(values)
    mean = math.fsum(values) / size
    deviation = 0.0
    if size > 1:
        deviation = math.sqrt(
            math.fsum((value - mean) ** 2 for value in values) / (size - 1)
        )
    powers = [
        (1 + scale * (value - mean) / (deviation + 1e-8)) ** exponent
        for value in values
    ]
    total = math.fsum(map(math.exp, powers))
    return [size * math.exp(power) / total for power in powers]


@settings(max_examples=300, deadline=None)
@given(
    values=lengths,
    exponent=exponents,
    scale=st.sampled_from([0.01, 1 / 9, 0.29]),
)
def test_length_weights_and_their_slopes_equal_the_formula(
    values: list[int], exponent: float, scale: float
) -> None:
    weights_G, slopes_G = group_weights(np.array(values, np.float64), exponent, scale)
    assert weights_G.tolist() == pytest.approx(
        by_loops(values, exponent, scale), rel=1e-11
    )
    assert weights_G.mean() == pytest.approx(1.0, rel=1e-13)
    above = by_loops(values, exponent + 1e-5, scale)
    below = by_loops(values, exponent - 1e-5, scale)
    differences = [(high - low) / 2e-5 for high, low in zip(above, below, strict=True)]
    assert slopes_G.tolist() == pytest.approx(differences, rel=1e-6, abs=1e-8)


def test_length_weights_of_known_lengths() -> None:
    assert of_lengths([10, 20, 30, 40], 1.0) == pytest.approx(
        [0.875, 0.953, 1.039, 1.133], abs=5e-4
    )
    assert of_lengths([10, 20, 30, 40], -1.0) == pytest.approx(
        [1.143, 1.031, 0.946, 0.879], abs=5e-4
    )


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
    length: int, size: int, exponent: float
) -> None:
    assert of_lengths([length] * size, exponent) == pytest.approx(
        [1.0] * size, rel=1e-14
    )


@settings(max_examples=200, deadline=None)
@given(
    values=lengths,
    exponent=st.floats(0.01, 6),
    data=st.data(),
)
def test_sign_of_lambda_prefers_long_or_short_rollouts(
    values: list[int], exponent: float, data: st.DataObject
) -> None:
    order = sorted(values)
    rising = of_lengths(order, exponent)
    falling = of_lengths(order, -exponent)
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    permuted = data.draw(st.permutations(order))
    weight_of = dict(zip(order, rising, strict=True))
    expected = [weight_of[value] for value in permuted]
    assert of_lengths(permuted, exponent) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("exponent", [-100.0, -7.0, 7.0, 100.0])
@pytest.mark.parametrize("scale", [1 / 9, 5.0])
def test_length_weights_are_finite_for_any_lambda_and_lengths(
    exponent: float, scale: float
) -> None:
    """Also where 1 + r z is below 0."""
    values = np.array([1.0] + [10_000.0] * 20)
    weights_G, slopes_G = group_weights(values, exponent, scale)
    assert np.isfinite(weights_G).all()
    assert np.isfinite(slopes_G).all()
    assert weights_G.mean() == pytest.approx(1.0)


@pytest.mark.parametrize("size", [2, 3, 16, 82, 83, 1000])
def test_largest_scale_gives_a_lone_short_rollout_weight_0(size: int) -> None:
    values = np.array([1.0] + [500.0] * (size - 1))
    z = (values[0] - values.mean()) / values.std(ddof=1)
    assert 1 + largest_scale(size) * z == pytest.approx(0.0, abs=1e-12)


# ----------------------------------------------------------------- rows


def row(
    group: str, rollout: str, num_tokens: int, *, is_trained: bool = True
) -> TrainSample:
    sample = row_of_turns(("t", 3, num_tokens, is_trained))
    return replace(sample, group_id=group, rollout_id=rollout)


def test_length_of_a_rollout_is_over_all_its_rows() -> None:
    samples = [
        row("a", "a0", 10),
        row("b", "b0", 7),
        row("a", "a1", 15),
        row("a", "a0", 20),
        row("a", "masked", 999, is_trained=False),
        row("a", "a1", 50, is_trained=False),
        row("a", "a2", 45),
    ]
    numbers = length_numbers(TrainedCounts.of(samples), exponent=2.0, scale=0.3)
    assert set(numbers) == {"a0", "a1", "a2", "b0"}
    weights = [numbers[name][LENGTH_WEIGHT] for name in ("a0", "a1", "a2")]
    assert weights == pytest.approx(by_loops([30, 15, 45], 2.0, 0.3), rel=1e-12)
    assert numbers["b0"] == {LENGTH_WEIGHT: 1.0, LENGTH_SLOPE: 0.0}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_order_of_rows_does_not_change_length_weights(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for number in range(12):
        group = number % 3
        samples.append(
            row(f"g{group}", f"g{group}r{rng.integers(3)}", int(rng.integers(1, 30)))
        )
    numbers = length_numbers(TrainedCounts.of(samples), exponent=-1.5, scale=0.4)
    order = rng.permutation(len(samples))
    permuted = length_numbers(
        TrainedCounts.of([samples[place] for place in order]), exponent=-1.5, scale=0.4
    )
    assert permuted.keys() == numbers.keys()
    for rollout_id, of_rollout in numbers.items():
        assert permuted[rollout_id] == pytest.approx(of_rollout, rel=1e-12, abs=1e-15)
