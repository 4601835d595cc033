"""Shaping of rewards against the papers' cases, written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages.reward_shaping import (
    Shaping,
    length_reward,
    soft_overlong_punishment,
)


@given(
    lengths=st.lists(st.integers(0, 200), min_size=1, max_size=9),
    max_length=st.integers(20, 120),
    buffer=st.integers(1, 20),
)
def test_the_overlong_punishment_has_three_cases(
    lengths: list[int], max_length: int, buffer: int
) -> None:
    expected: list[float] = []
    for length in lengths:
        if length <= max_length - buffer:
            expected.append(0.0)
        elif length <= max_length:
            expected.append(((max_length - buffer) - length) / buffer)
        else:
            expected.append(-1.0)
    measured = soft_overlong_punishment(
        np.array(lengths), max_length=max_length, buffer=buffer
    )
    assert measured.tolist() == pytest.approx(expected)


@given(
    members=st.lists(
        st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=9
    ),
)
def test_the_length_reward_equals_the_loop(members: list[tuple[int, bool]]) -> None:
    lengths = [length for length, _ in members]
    expected: list[float] = []
    for length, is_correct in members:
        share = 0.0
        if max(lengths) > min(lengths):
            share = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
        expected.append(share if is_correct else min(0.0, share))
    correct = np.array([is_correct for _, is_correct in members])
    assert length_reward(np.array(lengths), correct).tolist() == pytest.approx(expected)


def test_reward_terms_are_weighted_and_added() -> None:
    """Lengths 60, 90, 100 with a limit of 100 and a buffer of 20: 0, -0.5, -1, times 2.
    Length rewards 0.5, -0.25 and, for a wrong answer, -0.5, times 0.4."""
    shaping = Shaping(
        overlong_length=100,
        overlong_buffer=20,
        overlong_penalty=2.0,
        length_penalty=0.4,
    )
    terms = shaping.terms(np.array([1.0, 1.0, 0.0]), np.array([60, 90, 100]))
    assert terms.tolist() == pytest.approx([0.2, -1.0 - 0.1, -2.0 - 0.2])
    assert shaping.acts


def test_reward_is_unchanged_without_shaping_settings() -> None:
    shaping = Shaping(overlong_length=100)
    assert not shaping.acts
    assert shaping.terms(np.array([1.0, 0.0]), np.array([10, 1000])).tolist() == [
        0.0,
        0.0,
    ]
