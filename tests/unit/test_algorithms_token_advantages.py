"""GAE and V-trace against scalar loops over the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.advantages.token_advantages import (
    gae,
    length_adaptive_lambda,
    v_trace,
)

numbers = st.floats(-3, 3)
discounts = st.sampled_from([0.0, 0.5, 0.99, 1.0])


@dataclass
class TokenSequence:
    rewards: np.ndarray
    values: np.ndarray
    ratios: np.ndarray
    mask: np.ndarray

    @property
    def steps(self) -> list[int]:
        return [int(position) for position in np.flatnonzero(self.mask)]


@st.composite
def rows(draw: st.DrawFn) -> TokenSequence:
    """Up to 40 tokens, any of them trained, also none. Numbers of others are NaN:
    nothing reads them."""
    mask = draw(st.lists(st.booleans(), max_size=40))
    columns = []
    for of in (numbers, numbers, st.floats(0, 4)):
        columns.append(
            np.array(
                [draw(of) if is_trained else np.nan for is_trained in mask], np.float64
            )
        )
    return TokenSequence(*columns, mask=np.array(mask, np.bool_))


def returns_loop(row: TokenSequence, discount: float) -> np.ndarray:
    returns = np.zeros(len(row.mask))
    following = 0.0
    for t in reversed(row.steps):
        following = row.rewards[t] + discount * following
        returns[t] = following
    return returns


def gae_loop(row: TokenSequence, discount: float, lam: float) -> np.ndarray:
    advantages = np.zeros(len(row.mask))
    next_value = 0.0
    next_advantage = 0.0
    for t in reversed(row.steps):
        error = row.rewards[t] + discount * next_value - row.values[t]
        next_advantage = error + discount * lam * next_advantage
        advantages[t] = next_advantage
        next_value = row.values[t]
    return advantages


@given(
    row=rows(), discount=discounts, lam=discounts, critic_lambda=st.none() | discounts
)
def test_gae_equals_the_loop(
    row: TokenSequence, discount: float, lam: float, critic_lambda: float | None
) -> None:
    credit = gae(
        row.rewards,
        row.values,
        row.mask,
        discount=discount,
        policy_lambda=lam,
        critic_lambda=critic_lambda,
    )
    expected = gae_loop(row, discount, lam)
    assert credit.advantages_T.tolist() == pytest.approx(
        expected.tolist(), rel=1e-9, abs=1e-9
    )
    returns = gae_loop(row, discount, lam if critic_lambda is None else critic_lambda)
    for t in row.steps:
        assert credit.returns_T[t] == pytest.approx(
            returns[t] + row.values[t], rel=1e-9, abs=1e-9
        )
    assert not credit.returns_T[~row.mask].any()


@given(row=rows(), discount=discounts)
def test_critic_target_with_lambda_1_is_the_return(
    row: TokenSequence, discount: float
) -> None:
    credit = gae(
        row.rewards,
        row.values,
        row.mask,
        discount=discount,
        policy_lambda=0.3,
        critic_lambda=1.0,
    )
    expected = returns_loop(row, discount)
    assert credit.returns_T.tolist() == pytest.approx(
        expected.tolist(), rel=1e-7, abs=1e-7
    )


@given(row=rows(), discount=discounts, lam=discounts)
def test_context_tokens_are_not_steps_of_token_advantages(
    row: TokenSequence, discount: float, lam: float
) -> None:
    """The same numbers without the tokens in between."""
    whole = gae(row.rewards, row.values, row.mask, discount=discount, policy_lambda=lam)
    only = np.ones(len(row.steps), np.bool_)
    packed = gae(
        row.rewards[row.mask],
        row.values[row.mask],
        only,
        discount=discount,
        policy_lambda=lam,
    )
    assert whole.advantages_T[row.mask].tolist() == packed.advantages_T.tolist()


@given(
    row=rows(),
    discount=discounts,
    rho_bar=st.sampled_from([0.5, 1.0, 2.0]),
    c_bar=st.sampled_from([0.5, 1.0]),
    lam=st.sampled_from([0.9, 1.0]),
)
def test_v_trace_equals_the_loop(
    row: TokenSequence, discount: float, rho_bar: float, c_bar: float, lam: float
) -> None:
    credit = v_trace(
        row.rewards,
        row.values,
        row.ratios,
        row.mask,
        discount=discount,
        rho_bar=rho_bar,
        c_bar=c_bar,
        trace_lambda=lam,
    )
    targets = np.zeros(len(row.mask))
    advantages = np.zeros(len(row.mask))
    next_value = 0.0
    next_target = 0.0
    for t in reversed(row.steps):
        rho = min(rho_bar, row.ratios[t])
        c = lam * min(c_bar, row.ratios[t])
        error = rho * (row.rewards[t] + discount * next_value - row.values[t])
        advantages[t] = rho * (row.rewards[t] + discount * next_target - row.values[t])
        next_target = row.values[t] + error + discount * c * (next_target - next_value)
        next_value = row.values[t]
        targets[t] = next_target
    assert credit.returns_T.tolist() == pytest.approx(
        targets.tolist(), rel=1e-9, abs=1e-9
    )
    assert credit.advantages_T.tolist() == pytest.approx(
        advantages.tolist(), rel=1e-9, abs=1e-9
    )


@given(row=rows(), discount=discounts)
def test_on_policy_v_trace_is_the_return(row: TokenSequence, discount: float) -> None:
    credit = v_trace(
        row.rewards, row.values, np.ones(len(row.mask)), row.mask, discount=discount
    )
    expected = returns_loop(row, discount)
    assert credit.returns_T.tolist() == pytest.approx(
        expected.tolist(), rel=1e-7, abs=1e-7
    )


def test_exact_value_leaves_exactly_zero_advantage() -> None:
    """Rewards of 0 and values of 0, and a last reward that the values foretell."""
    mask = np.array([False, True, False, True, True])
    nothing = gae(np.zeros(5), np.zeros(5), mask)
    assert nothing.advantages_T.tolist() == [0.0] * 5
    foretold = gae(np.array([0, 0, 0, 0, 0.7]), np.full(5, 0.7), mask)
    assert foretold.advantages_T.tolist() == [0.0] * 5


def test_untrained_sample_has_no_token_advantages() -> None:
    mask = np.zeros(3, np.bool_)
    ones = np.ones(3)
    for credit in (gae(ones, ones, mask), v_trace(ones, ones, ones, mask)):
        assert credit.advantages_T.tolist() == credit.returns_T.tolist() == [0.0] * 3


def test_length_adaptive_lambda_grows_with_the_length() -> None:
    """VAPO, equation 5 with alpha 0.05."""
    assert length_adaptive_lambda(100) == pytest.approx(0.8)
    assert length_adaptive_lambda(1000) == pytest.approx(0.98)
    assert length_adaptive_lambda(19) == length_adaptive_lambda(0) == 0.0
    lam = length_adaptive_lambda(400, alpha=0.1)
    assert sum(lam**k for k in range(10_000)) == pytest.approx(0.1 * 400)


def test_token_advantages_refuse_arrays_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="beside a loss mask"):
        gae(np.zeros(3), np.zeros(2), np.ones(3, np.bool_))
