"""Whitening against loops over the batch, and what sums over parts must give."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages.whitening import Moments, whiten, whiten_samples
from invrl.algorithms.config import WhitenedOver

numbers = st.floats(-10, 10)


class Row(NamedTuple):
    """The advantages of a row's tokens, and which of them are trained."""

    values: list[float]
    mask: list[bool]
    rollout: str

    def trained(self, values: list[float]) -> list[float]:
        """Those of the values that stand at trained tokens."""
        return list(itertools.compress(values, self.mask))


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Rows of up to 6 tokens, some without a trained one; several may be of one
    rollout."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        mask = draw(st.lists(st.booleans(), max_size=6))
        values = [draw(numbers) for _ in mask]
        rollout = draw(st.sampled_from("abc"))
        rows.append(Row(values, mask, rollout))
    return rows


def whitened(
    rows: list[Row], over: WhitenedOver, std_floor: float = 0.0
) -> list[list[float]]:
    arrays = whiten_samples(
        [np.array(row.values, np.float64) for row in rows],
        [np.array(row.mask, np.bool_) for row in rows],
        [row.rollout for row in rows],
        over=over,
        std_floor=std_floor,
    )
    return [array.tolist() for array in arrays]


def trained(rows: list[Row]) -> list[float]:
    values: list[float] = []
    for row in rows:
        values += row.trained(row.values)
    return values


@given(rows=batches())
def test_whitening_over_tokens_counts_each_trained_token_once(rows: list[Row]) -> None:
    tokens = trained(rows)
    measured: list[float] = []
    for row, whitened_row in zip(rows, whitened(rows, "tokens"), strict=True):
        measured += row.trained(whitened_row)
    if len(tokens) < 2:
        assert measured == [0.0] * len(tokens)
        return
    variance = statistics.variance(tokens)
    if variance < 1e-9:  # as small as its own rounding
        return
    mean = statistics.mean(tokens)
    deviation = math.sqrt(variance + 1e-8)
    expected = [(value - mean) / deviation for value in tokens]
    assert measured == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rows=batches())
def test_whitening_over_rollouts_counts_each_rollout_once(rows: list[Row]) -> None:
    """Against a batch in which every rollout's tokens are repeated until all rollouts
    have as many."""
    values_by_rollout: dict[str, list[float]] = {}
    for row in rows:
        values_by_rollout.setdefault(row.rollout, []).extend(row.trained(row.values))
    means: list[float] = []
    squares: list[float] = []
    for values in values_by_rollout.values():
        if values:
            means.append(math.fsum(values) / len(values))
            squares.append(math.fsum(value**2 for value in values) / len(values))
    num_rollouts = len(means)
    if num_rollouts < 2:
        return
    mean = math.fsum(means) / num_rollouts
    variance = (math.fsum(squares) - num_rollouts * mean**2) / (num_rollouts - 1)
    if variance < 1e-9:
        return
    deviation = math.sqrt(variance + 1e-8)
    for row, whitened_row in zip(rows, whitened(rows, "rollouts"), strict=True):
        expected: list[float] = []
        for value, is_trained in zip(row.values, row.mask, strict=True):
            expected.append((value - mean) / deviation if is_trained else 0.0)
        assert whitened_row == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_whitening_over_rollouts_ignores_their_length() -> None:
    """Rollout a has 4 tokens of 1 in two rows, b one token of 4: the mean is 2.5, over
    tokens it is 1.6."""
    rows = [
        Row([1.0, 1.0], [True, True], "a"),
        Row([4.0], [True], "b"),
        Row([1.0, 1.0], [True, True], "a"),
    ]
    over_rollouts = whitened(rows, "rollouts")
    deviation = math.sqrt(4.5 + 1e-8)
    assert over_rollouts[0] == pytest.approx([-1.5 / deviation] * 2)
    assert over_rollouts[1] == pytest.approx([1.5 / deviation])
    over_tokens = whitened(rows, "tokens")
    deviation = math.sqrt(1.8 + 1e-8)
    assert over_tokens[1] == pytest.approx([2.4 / deviation])


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_whitened_equal_advantages_are_exactly_zero(over: WhitenedOver) -> None:
    equal_rows = [
        Row([0.1] * 7, [True] * 7, "a"),
        Row([0.1] * 3, [True, False, True], "b"),
    ]
    assert whitened(equal_rows, over) == [[0.0] * 7, [0.0] * 3]
    single_token = Row([5.0], [True], "a")
    assert whitened([single_token], over) == [[0.0]]
    untrained = Row([5.0, 5.0], [False, False], "a")
    assert whitened([untrained], over) == [[0.0, 0.0]]
    assert whitened([], over) == []


def test_no_whitening_keeps_advantages_and_untrained_tokens_are_zero() -> None:
    rows = [
        Row([1.0, 9.0], [True, False], "a"),
        Row([3.0], [True], "b"),
    ]
    assert whitened(rows, "none") == [[1.0, 9.0], [3.0]]
    first, second = whitened(rows, "tokens")
    assert first[1] == 0.0
    assert first[0] == -second[0] != 0.0


def test_floor_bounds_the_deviation_of_whitening() -> None:
    rows = [
        Row([1.0], [True], "a"),
        Row([1.01], [True], "b"),
    ]
    first, second = whitened(rows, "tokens", std_floor=0.5)
    assert first == pytest.approx([-0.01])
    assert second == pytest.approx([0.01])


@given(parts=st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5))
def test_whitening_sums_of_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    together = Moments()
    whole: list[float] = []
    for part in parts:
        together += Moments.of(np.array(part))
        whole += part
    assert together.count == len(whole)
    if not whole:
        assert together.mean == 0.0
        assert together.variance == 0.0
        return
    assert together.mean == pytest.approx(statistics.mean(whole), abs=1e-12)
    if len(whole) > 1:
        variance = statistics.variance(whole)
        assert together.variance == pytest.approx(variance, rel=1e-6, abs=1e-9)


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    values_N = np.array([1.0, 2.0, 6.0])
    whitened_N = whiten(values_N, Moments.of(values_N))
    assert whitened_N.mean() == pytest.approx(0.0, abs=1e-12)
    assert whitened_N.std(ddof=1) == pytest.approx(1.0, rel=1e-6)


@given(
    rows=batches(),
    constant=st.sampled_from([-4.0, 3.0]),
)
def test_constant_added_to_all_advantages_does_not_change_whitening(
    rows: list[Row], constant: float
) -> None:
    values = trained(rows)
    if len(values) < 2 or statistics.variance(values) < 1e-3:
        return
    shifted_rows: list[Row] = []
    for row in rows:
        shifted = [value + constant for value in row.values]
        shifted_rows.append(row._replace(values=shifted))
    expected = whitened(rows, "tokens")
    measured = whitened(shifted_rows, "tokens")
    for expected_row, measured_row in zip(expected, measured, strict=True):
        assert measured_row == pytest.approx(expected_row, rel=1e-6, abs=1e-6)
