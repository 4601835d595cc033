"""Where mainly long or unrewarded rollouts are lost, this is measured and said."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp, kstwobign
from small_buffer import summary

from invrl.buffer.selection import Selection, same_distribution
from invrl.observe.metrics.trained_and_asked import trained_and_asked
from invrl.types.metrics import resolve


def metrics_of(selection: Selection) -> dict[str, float | None]:
    values = resolve(selection.metrics(), "buffer/")
    return dict(values)


def selection_of(*, lost_length: int, lost_reward: float) -> Selection:
    """300 trained rollouts of about 100 tokens, half of them rewarded; 100 lost
    ones."""
    random = np.random.default_rng(0)
    selection = Selection()
    for number in range(400):
        length = 100 if number % 4 else lost_length
        length += int(random.integers(-20, 20))
        if number % 4:
            selection.note_trained(
                summary("g", 0, tokens=length, reward=float(random.integers(2)))
            )
        else:
            reward = float(random.random() < lost_reward)
            selection.note_lost(summary("g", 0, tokens=length, reward=reward))
    return selection


def test_loss_of_long_rollouts_is_measured_and_said() -> None:
    row = metrics_of(selection_of(lost_length=300, lost_reward=0.5))
    assert row["buffer/lost_share"] == 0.25
    assert row["buffer/trained_length_ratio"] == pytest.approx(100 / 150, abs=0.01)
    text = trained_and_asked(row)
    assert "25% of the last rollouts were lost" in text
    assert re.search(r"have 0.6[67] times their mean length", text)
    assert "mean reward" not in text
    assert "--when-stale train" in text


def test_loss_of_unrewarded_rollouts_is_measured_and_said() -> None:
    row = metrics_of(selection_of(lost_length=100, lost_reward=0.0))
    text = trained_and_asked(row)
    assert "have a mean reward that is +0.1" in text
    assert "length" not in text


def test_loss_by_chance_is_not_said() -> None:
    row = metrics_of(selection_of(lost_length=100, lost_reward=0.5))
    assert not trained_and_asked(row)


def test_nothing_is_said_before_anything_was_trained_or_where_nothing_was_lost() -> (
    None
):
    selection = Selection()
    selection.note_lost(summary("g", 0))
    assert selection.metrics() == {}
    selection = Selection()
    selection.note_trained(summary("g", 0))
    row = metrics_of(selection)
    assert row["buffer/trained_length_ratio"] == 1.0
    assert row["buffer/trained_length_p"] == 1.0
    assert not trained_and_asked(row)
    assert not trained_and_asked({})


def test_cancelled_rollouts_have_a_length_and_no_reward() -> None:
    selection = Selection()
    for _ in range(100):
        selection.note_trained(summary("g", 0, tokens=100, reward=1.0))
        selection.note_cancelled(summary("g", 1, tokens=300, reward=0.0))
    row = metrics_of(selection)
    assert row["buffer/trained_length_ratio"] == 0.5
    assert row["buffer/trained_reward_difference"] == 0.0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=60),
    st.lists(st.integers(0, 30).map(float), min_size=1, max_size=60),
)
def test_probability_is_that_of_scipys_statistic_and_limit_distribution(
    first: list[float], second: list[float]
) -> None:
    statistic = ks_2samp(first, second).statistic
    size = len(first) * len(second) / (len(first) + len(second))
    expected = kstwobign.sf(np.sqrt(size) * statistic)
    assert same_distribution(first, second) == pytest.approx(expected, rel=1e-9)
