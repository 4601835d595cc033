"""Advantages against loops in float64, and what must hold for any rewards."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages import ADVANTAGES, advantage_function, dr_grpo, grpo
from invrl.algorithms.config import Deviation
from invrl.errors import PluginError

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=33)


@pytest.mark.parametrize("deviation", ["sample", "population"])
@given(rewards_G=rewards, eps=st.sampled_from([1e-6, 1e-4, 1e-2]))
def test_grpo_equals_the_loop(deviation: Deviation, rewards_G: list[float], eps: float) -> None:
    mean = math.fsum(rewards_G) / len(rewards_G)
    squares = math.fsum((r - mean) ** 2 for r in rewards_G)
    freedom = len(rewards_G) - 1 if deviation == "sample" else len(rewards_G)
    spread = math.sqrt(squares / freedom) if freedom else 0.0
    expected = [(r - mean) / (spread + eps) for r in rewards_G]
    measured = advantage_function("grpo", deviation)(np.array(rewards_G), eps=eps)
    assert measured.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(rewards_G=rewards)
def test_dr_grpo_equals_the_loop(rewards_G: list[float]) -> None:
    mean = math.fsum(rewards_G) / len(rewards_G)
    expected = [r - mean for r in rewards_G]
    assert dr_grpo(np.array(rewards_G), eps=1.0).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_deviation_is_the_samples_unless_the_population_s_is_asked_for() -> None:
    """[0, 1]: the sample's deviation is sqrt(1/2), the population's 1/2: a factor sqrt(2) at two members."""
    rewards_G = np.array([0.0, 1.0])
    sample = advantage_function("grpo")(rewards_G, eps=1e-12)
    population = advantage_function("grpo", "population")(rewards_G, eps=1e-12)
    assert sample.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert population.tolist() == pytest.approx([-1.0, 1.0])


def test_the_sample_deviation_is_the_statistics_module_s() -> None:
    rewards_G = [0.0, 0.25, 1.0, 1.0, -2.0, 0.5, 3.0, 0.125]
    mean = statistics.mean(rewards_G)
    expected = [(r - mean) / statistics.stdev(rewards_G) for r in rewards_G]
    assert grpo(np.array(rewards_G), eps=0.0).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("deviation", ["sample", "population"])
@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("group", [[3.0], [0.1] * 7, [0.1 + 0.2, 0.3], [0.0] * 8])
def test_no_difference_no_advantage(name: str, group: list[float], deviation: Deviation) -> None:
    """Exactly 0: the mean of seven times 0.1 is not 0.1, and Adam makes a step of any gradient but 0."""
    advantages_G = advantage_function(name, deviation)(np.array(group), eps=1e-4)
    assert advantages_G.dtype == np.float64
    assert advantages_G.tolist() == [0.0] * len(group)


def test_unknown_names_suggest_the_nearest() -> None:
    assert advantage_function("grpo") is grpo
    with pytest.raises(PluginError, match="did you mean 'dr_grpo'"):
        advantage_function("drgrpo")
