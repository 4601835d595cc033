"""Whitening against loops over the batch, and what sums over parts must give."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.config import WhitenedOver
from invrl.algorithms.whitening import Moments, whiten, whiten_rows

numbers = st.floats(-10, 10)
Row = tuple[list[float], list[bool], str]


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Rows of up to 6 tokens, some without a trained one; several may be of one
    rollout."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        mask = draw(st.lists(st.booleans(), max_size=6))
        values = [draw(numbers) for _ in mask]
        rows.append((values, mask, draw(st.sampled_from("abc"))))
    return rows


def whitened(
    rows: list[Row], over: WhitenedOver, std_floor: float = 0.0
) -> list[list[float]]:
    arrays = whiten_rows(
        [np.array(values, np.float64) for values, _, _ in rows],
        [np.array(mask, np.bool_) for _, mask, _ in rows],
        [rollout for _, _, rollout in rows],
        over=over,
        std_floor=std_floor,
    )
    return [array.tolist() for array in arrays]


def trained(rows: list[Row]) -> list[tuple[float, str]]:
    return [
        (value, rollout)
        for values, mask, rollout in rows
        for value, is_trained in zip(values, mask, strict=True)
        if is_trained
    ]


@given(rows=batches())
def test_whitening_over_tokens_counts_each_trained_token_once(rows: list[Row]) -> None:
    tokens = [value for value, _ in trained(rows)]
    measured = [
        value
        for row, (_, mask, _) in zip(whitened(rows, "tokens"), rows, strict=True)
        for value, is_trained in zip(row, mask, strict=True)
        if is_trained
    ]
    if len(tokens) < 2:
        assert measured == [0.0] * len(tokens)
        return
    if statistics.variance(tokens) < 1e-9:  # as small as its own rounding
        return
    mean = statistics.mean(tokens)
    expected = [
        (value - mean) / math.sqrt(statistics.variance(tokens) + 1e-8)
        for value in tokens
    ]
    assert measured == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(rows=batches())
def test_whitening_over_rollouts_counts_each_rollout_once(rows: list[Row]) -> None:
    """Against a batch in which every rollout's tokens are repeated until all rollouts
    have as many."""
    tokens = trained(rows)
    names = sorted({rollout for _, rollout in tokens})
    if len(names) < 2:
        return
    means = []
    squares = []
    for name in names:
        mine = [value for value, rollout in tokens if rollout == name]
        means.append(math.fsum(mine) / len(mine))
        squares.append(math.fsum(value**2 for value in mine) / len(mine))
    mean = math.fsum(means) / len(names)
    variance = (math.fsum(squares) - len(names) * mean**2) / (len(names) - 1)
    if variance < 1e-9:
        return
    for row, (values, mask, _) in zip(whitened(rows, "rollouts"), rows, strict=True):
        expected = [
            (value - mean) / math.sqrt(variance + 1e-8) if is_trained else 0.0
            for value, is_trained in zip(values, mask, strict=True)
        ]
        assert row == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_whitening_over_rollouts_ignores_their_length() -> None:
    """Rollout a has 4 tokens of 1 in two rows, b one token of 4: the mean is 2.5, over
    tokens it is 1.6."""
    rows: list[Row] = [
        ([1.0, 1.0], [True] * 2, "a"),
        ([4.0], [True], "b"),
        ([1.0, 1.0], [True] * 2, "a"),
    ]
    deviation = math.sqrt(4.5 + 1e-8)
    assert whitened(rows, "rollouts")[1] == pytest.approx([1.5 / deviation])
    assert whitened(rows, "rollouts")[0] == pytest.approx([-1.5 / deviation] * 2)
    assert whitened(rows, "tokens")[1] == pytest.approx([2.4 / math.sqrt(1.8 + 1e-8)])


@pytest.mark.parametrize("over", ["tokens", "rollouts"])
def test_whitened_equal_advantages_are_exactly_zero(over: WhitenedOver) -> None:
    rows: list[Row] = [
        ([0.1] * 7, [True] * 7, "a"),
        ([0.1] * 3, [True, False, True], "b"),
    ]
    assert whitened(rows, over) == [[0.0] * 7, [0.0] * 3]
    assert whitened([([5.0], [True], "a")], over) == [[0.0]]
    assert whitened([([5.0, 5.0], [False, False], "a")], over) == [[0.0, 0.0]]
    assert whitened([], over) == []


def test_no_whitening_keeps_advantages_and_untrained_tokens_are_zero() -> None:
    rows: list[Row] = [
        ([1.0, 9.0], [True, False], "a"),
        ([3.0], [True], "b"),
    ]
    assert whitened(rows, "none") == [[1.0, 9.0], [3.0]]
    first, second = whitened(rows, "tokens")
    assert first[1] == 0.0
    assert first[0] == -second[0] != 0.0


def test_floor_bounds_the_deviation_of_whitening() -> None:
    rows: list[Row] = [
        ([1.0], [True], "a"),
        ([1.01], [True], "b"),
    ]
    assert whitened(rows, "tokens", std_floor=0.5) == [
        pytest.approx([-0.01]),
        pytest.approx([0.01]),
    ]


@given(parts=st.lists(st.lists(numbers, max_size=5), min_size=1, max_size=5))
def test_whitening_sums_of_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    whole = [value for part in parts for value in part]
    together = Moments()
    for part in parts:
        together += Moments.of(np.array(part))
    assert together.count == len(whole)
    if not whole:
        assert together.mean == 0.0
        assert together.variance == 0.0
        return
    assert together.mean == pytest.approx(statistics.mean(whole), abs=1e-12)
    if len(whole) > 1:
        assert together.variance == pytest.approx(
            statistics.variance(whole), rel=1e-6, abs=1e-9
        )


def test_whitening_without_shift_keeps_the_mean() -> None:
    """TRL's and verl's `shift_mean=False`."""
    values_N = np.array([1.0, 2.0, 6.0])
    moments = Moments.of(values_N)
    shifted_N = whiten(values_N, moments)
    assert whiten(values_N, moments, shift_mean=False).tolist() == pytest.approx(
        (shifted_N + 3.0).tolist()
    )
    assert shifted_N.mean() == pytest.approx(0.0, abs=1e-12)
    assert shifted_N.std(ddof=1) == pytest.approx(1.0, rel=1e-6)


@given(
    rows=batches(),
    constant=st.sampled_from([-4.0, 3.0]),
)
def test_constant_added_to_all_advantages_does_not_change_whitening(
    rows: list[Row], constant: float
) -> None:
    values = [value for value, _ in trained(rows)]
    if len(values) < 2 or statistics.variance(values) < 1e-3:
        return
    shifted = [
        ([value + constant for value in row], mask, rollout)
        for row, mask, rollout in rows
    ]
    for row, moved in zip(
        whitened(rows, "tokens"), whitened(shifted, "tokens"), strict=True
    ):
        assert moved == pytest.approx(row, rel=1e-6, abs=1e-6)
