"""Advantages against loops in float64, and what must hold for any rewards."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages.advantages import (
    ADVANTAGES,
    advantage_function,
    configured_advantage,
    dr_grpo,
    grpo,
    maxrl,
    pass_at_k,
    raw,
    rewards_differ,
    rloo,
)
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import AdvantageStdConfig, Deviation
from invrl.errors import PluginError

rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=33)
small_groups = st.lists(
    st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=9
)
COMPARING = sorted(name for name, function in ADVANTAGES.items() if function is not raw)


def group_mean(rewards_G: list[float]) -> float:
    return math.fsum(rewards_G) / len(rewards_G)


def assert_close(
    measured_G: np.ndarray,
    expected_G: list[float],
    *,
    relative: float = 1e-9,
    absolute: float = 1e-9,
) -> None:
    expected = pytest.approx(expected_G, rel=relative, abs=absolute)
    assert measured_G.tolist() == expected


@pytest.mark.parametrize("deviation", ["sample", "population"])
@given(
    rewards_G=rewards,
    eps=st.sampled_from([1e-6, 1e-4, 1e-2]),
)
def test_grpo_equals_the_loop(
    deviation: Deviation, rewards_G: list[float], eps: float
) -> None:
    mean = group_mean(rewards_G)
    squares = math.fsum((reward - mean) ** 2 for reward in rewards_G)
    freedom = len(rewards_G)
    if deviation == "sample":
        freedom -= 1
    spread = math.sqrt(squares / freedom) if freedom else 0.0
    expected_G = [(reward - mean) / (spread + eps) for reward in rewards_G]
    function = advantage_function("grpo", deviation)
    assert_close(function(np.array(rewards_G), eps=eps), expected_G)


@given(rewards_G=rewards)
def test_dr_grpo_equals_the_loop(rewards_G: list[float]) -> None:
    mean = group_mean(rewards_G)
    expected_G = [reward - mean for reward in rewards_G]
    measured_G = dr_grpo(np.array(rewards_G), eps=1.0)
    assert_close(measured_G, expected_G, absolute=1e-12)


def test_advantages_use_the_sample_deviation_unless_set_otherwise() -> None:
    """[0, 1]: the sample's deviation is sqrt(1/2), the population's 1/2: a factor
    sqrt(2) at two members."""
    rewards_G = np.array([0.0, 1.0])
    sample_G = advantage_function("grpo")(rewards_G, eps=1e-12)
    population_G = advantage_function("grpo", "population")(rewards_G, eps=1e-12)
    half_root = math.sqrt(0.5)
    assert_close(sample_G, [-half_root, half_root])
    assert_close(population_G, [-1.0, 1.0])


def test_sample_deviation_equals_the_statistics_module() -> None:
    rewards_G = [0.0, 0.25, 1.0, 1.0, -2.0, 0.5, 3.0, 0.125]
    mean = statistics.mean(rewards_G)
    deviation = statistics.stdev(rewards_G)
    expected_G = [(reward - mean) / deviation for reward in rewards_G]
    measured_G = grpo(np.array(rewards_G), eps=0.0)
    assert_close(measured_G, expected_G, relative=1e-12, absolute=1e-12)


@pytest.mark.parametrize("deviation", ["sample", "population"])
@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("group", [[3.0], [0.1] * 7, [0.1 + 0.2, 0.3], [0.0] * 8])
def test_equal_rewards_give_zero_advantages(
    name: str, group: list[float], deviation: Deviation
) -> None:
    """Exactly 0: the mean of seven times 0.1 is not 0.1, and Adam makes a step of any
    gradient but 0."""
    advantages_G = advantage_function(name, deviation)(np.array(group), eps=1e-4)
    assert advantages_G.dtype == np.float64
    assert advantages_G.tolist() == [0.0] * len(group)


def test_unknown_advantage_name_suggests_the_nearest() -> None:
    assert advantage_function("grpo") is grpo
    with pytest.raises(PluginError, match="did you mean 'dr_grpo'"):
        advantage_function("drgrpo")


@given(rewards_G=rewards)
def test_rloo_equals_the_loop(rewards_G: list[float]) -> None:
    expected_G: list[float] = []
    for index, reward in enumerate(rewards_G):
        others = rewards_G[:index] + rewards_G[index + 1 :]
        baseline = group_mean(others) if others else reward
        expected_G.append(reward - baseline)
    measured_G = rloo(np.array(rewards_G), eps=1.0)
    assert_close(measured_G, expected_G, absolute=1e-12)


@given(rewards_G=st.lists(st.floats(0, 10), min_size=1, max_size=33))
def test_maxrl_equals_the_loop(rewards_G: list[float]) -> None:
    mean = group_mean(rewards_G)
    expected_G = [0.0] * len(rewards_G)
    if rewards_differ(np.array(rewards_G)):
        expected_G = [(reward - mean) / mean for reward in rewards_G]
    measured_G = maxrl(np.array(rewards_G), eps=1e-4)
    assert_close(measured_G, expected_G)


def test_maxrl_weighs_rare_successes_more() -> None:
    """One of four: G/K - 1 = 3; three of four: 1/3. A failure is -1 in both."""
    rare_G = maxrl(np.array([0.0, 1.0, 0.0, 0.0]), eps=1e-4)
    frequent_G = maxrl(np.array([1.0, 1.0, 0.0, 1.0]), eps=1e-4)
    assert_close(rare_G, [-1, 3, -1, -1], relative=1e-6)
    assert_close(frequent_G, [1 / 3, 1 / 3, -1, 1 / 3], relative=1e-6)


def test_maxrl_of_the_smallest_rewards_is_that_of_larger_ones() -> None:
    smallest = np.nextafter(0.0, 1.0)
    rewards_G = np.array([1.0, -1.0, 0.0, 0.0])
    measured_G = maxrl(rewards_G * smallest, eps=1e-4)
    assert measured_G.tolist() == maxrl(rewards_G, eps=1e-4).tolist()


def test_maxrl_with_rewards_below_zero_divides_by_the_rewards_above() -> None:
    """Rewards of -1 and 1 are twice as far apart as 0 and 1, and so are their
    advantages."""
    signed_G = maxrl(np.array([-1.0, 1.0, -1.0, -1.0]), eps=1e-4)
    unsigned_G = maxrl(np.array([0.0, 1.0, 0.0, 0.0]), eps=1e-4)
    assert_close(signed_G, (2 * unsigned_G).tolist(), relative=1e-6)
    never_above_G = maxrl(np.array([-1.0, -0.5, 0.0]), eps=1e-4)
    assert never_above_G.tolist() == [0.0, 0.0, 0.0]
    extreme_G = maxrl(np.array([-1e9, 1e-12]), eps=1e-4)
    assert np.abs(extreme_G).max() == pytest.approx(1e4)


@given(
    rewards_G=small_groups,
    k=st.integers(1, 6),
    eps=st.sampled_from([1e-6, 1e-3]),
)
def test_pass_at_k_equals_the_loop_over_all_subsets(
    rewards_G: list[float], k: int, eps: float
) -> None:
    members = range(len(rewards_G))
    subsets = list(itertools.combinations(members, k))
    best_rewards = [max(rewards_G[i] for i in subset) for subset in subsets]
    expected_G = [0.0] * len(rewards_G)
    if len(subsets) > 1:
        mean = group_mean(best_rewards)
        squares = [(reward - mean) ** 2 for reward in best_rewards]
        spread = math.sqrt(group_mean(squares))
        for member in members:
            rewards_with_member = [
                reward
                for reward, subset in zip(best_rewards, subsets, strict=True)
                if member in subset
            ]
            gain = group_mean(rewards_with_member) - mean
            expected_G[member] = gain / (spread + eps)
    measured_G = pass_at_k(np.array(rewards_G), eps=eps, k=k)
    assert_close(measured_G, expected_G)
    if len(set(best_rewards)) <= 1:
        assert measured_G.tolist() == [0.0] * len(rewards_G)


def test_pass_at_k_has_the_papers_closed_forms() -> None:
    """arXiv 2508.10751, equations 11 to 15, with N = 8 of which 3 are right, and k =
    4."""
    rewards_G = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    mean = 1 - math.comb(5, 4) / math.comb(8, 4)
    spread = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / spread
    wrong = (1 - mean - math.comb(4, 3) / math.comb(7, 3)) / spread
    expected_G = [right if reward else wrong for reward in rewards_G]
    measured_G = advantage_function("pass_at_k")(rewards_G, eps=1e-12)
    assert_close(measured_G, expected_G, relative=1e-6)


@given(rewards_G=rewards)
def test_pass_at_1_is_grpo_with_the_populations_deviation(
    rewards_G: list[float],
) -> None:
    expected_G = grpo(np.array(rewards_G), eps=1e-4, deviation="population")
    measured_G = pass_at_k(np.array(rewards_G), eps=1e-4, k=1)
    assert_close(measured_G, expected_G.tolist(), relative=1e-6, absolute=1e-6)


def test_raw_advantage_is_the_reward() -> None:
    rewards_G = np.array([0.1] * 7 + [3.0])
    assert raw(rewards_G, eps=1.0).tolist() == rewards_G.tolist()


def test_floor_bounds_the_deviation_of_group_advantages() -> None:
    """The deviation of [0, 0.01] is 0.00707: with a floor of 0.5 it does not blow the
    difference up."""
    rewards_G = np.array([0.0, 0.01])
    std = AdvantageStdConfig(floor=0.5, eps=1e-9)
    config = AlgorithmConfig(advantage_std=std)
    with_floor = configured_advantage(config)
    assert_close(with_floor(rewards_G, eps=1e-9), [-0.01, 0.01], relative=1e-6)
    far_apart_G = with_floor(rewards_G * 1000, eps=1e-9)
    half_root = math.sqrt(0.5)
    assert_close(far_apart_G, [-half_root, half_root], relative=1e-6)
    best_of_1 = AlgorithmConfig(advantage="pass_at_k", pass_at_k=1, advantage_std=std)
    best_of_1_G = configured_advantage(best_of_1)(rewards_G, eps=1e-9)
    assert_close(best_of_1_G, [-0.01, 0.01], relative=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(
    data=st.data(),
    rewards_G=st.lists(st.floats(0, 10), min_size=1, max_size=12),
)
def test_order_of_a_group_does_not_change_its_advantages(
    name: str, data: st.DataObject, rewards_G: list[float]
) -> None:
    order = data.draw(st.permutations(range(len(rewards_G))))
    function = advantage_function(name)
    in_order_G = function(np.array(rewards_G), eps=1e-4)
    permuted_G = function(np.array(rewards_G)[order], eps=1e-4)
    expected_G = in_order_G[order].tolist()
    assert_close(permuted_G, expected_G, relative=1e-7, absolute=1e-7)


@pytest.mark.parametrize("name", sorted(set(COMPARING) - {"maxrl"}))
@given(
    rewards_G=small_groups,
    constant=st.sampled_from([-64.0, 0.5, 7.0]),
)
def test_constant_added_to_all_rewards_does_not_change_advantages(
    name: str, rewards_G: list[float], constant: float
) -> None:
    function = advantage_function(name)
    expected_G = function(np.array(rewards_G), eps=1e-4)
    shifted_G = function(np.array(rewards_G) + constant, eps=1e-4)
    assert_close(shifted_G, expected_G.tolist())
