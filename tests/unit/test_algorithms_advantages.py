"""Advantages against loops in float64, and what must hold for any rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages import ADVANTAGES, advantage_function, dr_grpo, grpo
from invrl.errors import PluginError

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=33)


@given(rewards_G=rewards, eps=st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_grpo_equals_the_loop(rewards_G: list[float], eps: float) -> None:
    mean = math.fsum(rewards_G) / len(rewards_G)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards_G) / len(rewards_G))
    expected = [(r - mean) / (deviation + eps) for r in rewards_G]
    assert grpo(np.array(rewards_G), eps=eps).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rewards_G=rewards)
def test_dr_grpo_equals_the_loop(rewards_G: list[float]) -> None:
    mean = math.fsum(rewards_G) / len(rewards_G)
    expected = [r - mean for r in rewards_G]
    assert dr_grpo(np.array(rewards_G), eps=1.0).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_deviation_is_the_populations() -> None:
    """[0, 1]: population std 0.5 gives ±1; the sample std (0.707) would give ±0.707."""
    assert grpo(np.array([0.0, 1.0]), eps=1e-12).tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("group", [[3.0], [0.1] * 7])
def test_no_difference_no_advantage(name: str, group: list[float]) -> None:
    advantages_G = ADVANTAGES[name](np.array(group), eps=1e-4)
    assert advantages_G.dtype == np.float64
    assert advantages_G.tolist() == pytest.approx([0.0] * len(group), abs=1e-9)


def test_unknown_names_suggest_the_nearest() -> None:
    assert advantage_function("grpo") is grpo
    with pytest.raises(PluginError, match="did you mean 'dr_grpo'"):
        advantage_function("drgrpo")
