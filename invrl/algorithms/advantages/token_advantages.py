"""Advantages and returns of single tokens, from token rewards and a critic's values.
Pure NumPy.

One sample at a time: arrays [T] over its tokens, with a loss mask of the trained ones.
Only those are steps of the episode: the next step of a trained token is the next
trained token, however many context tokens (a tool's result, another turn's prompt) lie
between. Rewards and values of other tokens are not read, and their results are 0. The
value after the last trained token is 0. A discount is per trained token. Results are
float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenAdvantages:
    """Credit of a sample: float64 [T] each, 0 where the loss mask is False."""

    advantages_T: NDArray[np.float64]
    """Used in the policy's loss."""
    returns_T: NDArray[np.float64]
    """Targets of the critic's values."""


def gae(
    rewards_T: Floats,
    values_T: Floats,
    mask_T: NDArray[np.bool_],
    *,
    discount: float = 1.0,
    policy_lambda: float = 0.95,
    critic_lambda: float | None = None,
) -> TokenAdvantages:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16).

        d_t = r_t + discount * V_{t+1} - V_t
        A_t = d_t + discount * lambda * A_{t+1}
        return_t = A_t + V_t

    The returns are those of `critic_lambda`, by default the policy's: decoupled GAE
    (VC-PPO, arXiv 2503.01491, and VAPO, arXiv 2504.05118) trains the critic with lambda
    1, on returns without bias.

    With one lambda the result is that of verl's `compute_gae_advantage_return` before
    it whitens, which skips untrained tokens in the same way. TRL's PPO has no untrained
    tokens between trained ones, and is the same on one turn. OpenRLHF and slime treat
    every token as a step, including untrained ones.

    Raises ValueError for arrays of different lengths.
    """
    _check_lengths(mask_T, rewards_T, values_T)
    rewards_N = _trained(rewards_T, mask_T)
    values_N = _trained(values_T, mask_T)
    errors_N = rewards_N + discount * _next(values_N) - values_N
    advantages_N = _recurrence(
        errors_N, np.full(len(errors_N), discount * policy_lambda)
    )
    critic_advantages_N = advantages_N
    if critic_lambda is not None:
        critic_advantages_N = _recurrence(
            errors_N, np.full(len(errors_N), discount * critic_lambda)
        )
    return TokenAdvantages(
        advantages_T=_placed(advantages_N, mask_T),
        returns_T=_placed(critic_advantages_N + values_N, mask_T),
    )


def length_adaptive_lambda(num_tokens: int, alpha: float = 0.05) -> float:
    """VAPO's lambda of the policy, for a sample with this many trained tokens (arXiv
    2504.05118, equation 5).

        lambda = 1 - 1 / (alpha * num_tokens)

    The sum of the weights lambda^k is then alpha * num_tokens, so that the share of
    bias does not depend on the length. The paper's alpha is 0.05. Below 1 / alpha
    tokens the formula is negative; it is then 0.
    """
    if num_tokens == 0:
        return 0.0
    return max(1.0 - 1.0 / (alpha * num_tokens), 0.0)


def v_trace(
    rewards_T: Floats,
    values_T: Floats,
    ratios_T: Floats,
    mask_T: NDArray[np.bool_],
    *,
    discount: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    trace_lambda: float = 1.0,
) -> TokenAdvantages:
    """V-trace (IMPALA, arXiv 1802.01561, equation 1 and section 4.2; lambda: its remark
    2).

        rho_t = min(rho_bar, ratio_t)      c_t = lambda * min(c_bar, ratio_t)
        d_t = rho_t * (r_t + discount * V_{t+1} - V_t)
        v_t = V_t + d_t + discount * c_t * (v_{t+1} - V_{t+1})
        A_t = rho_t * (r_t + discount * v_{t+1} - V_t)

    ratios_T: current over behaviour policy, at least 0. The returns are v_t. The
    advantages contain rho_t, so no other correction of the same ratio may be applied.
    With ratios of 1 and lambda 1, v_t is the discounted return. Raises ValueError for
    arrays of different lengths.
    """
    _check_lengths(mask_T, rewards_T, values_T, ratios_T)
    rewards_N = _trained(rewards_T, mask_T)
    values_N = _trained(values_T, mask_T)
    ratios_N = _trained(ratios_T, mask_T)
    rho_N = np.minimum(ratios_N, rho_bar)
    c_N = trace_lambda * np.minimum(ratios_N, c_bar)
    errors_N = rho_N * (rewards_N + discount * _next(values_N) - values_N)
    targets_N = values_N + _recurrence(errors_N, discount * c_N)
    advantages_N = rho_N * (rewards_N + discount * _next(targets_N) - values_N)
    return TokenAdvantages(
        advantages_T=_placed(advantages_N, mask_T), returns_T=_placed(targets_N, mask_T)
    )


def _recurrence(
    inputs_N: NDArray[np.float64], factors_N: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Solve y_t = x_t + f_t * y_{t+1}, with 0 after the end: [N], [N] -> [N].

    Takes log2(N) whole-array steps instead of N scalar ones: after each, y_t has the
    terms of twice as many tokens, and f_t is the product of as many factors.
    """
    sums_N = inputs_N.copy()
    products_N = factors_N.copy()
    reach = 1
    while reach < len(sums_N):
        sums_N[:-reach] = sums_N[:-reach] + products_N[:-reach] * sums_N[reach:]
        products_N[:-reach] = products_N[:-reach] * products_N[reach:]
        reach *= 2
    return sums_N


def _next(values_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the value of the next trained token; 0 after the last."""
    return np.append(values_N[1:], np.zeros(min(len(values_N), 1)))


def _trained(values_T: Floats, mask_T: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray(values_T, np.float64)[mask_T]


def _placed(
    values_N: NDArray[np.float64], mask_T: NDArray[np.bool_]
) -> NDArray[np.float64]:
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = values_N
    return values_T


def _check_lengths(mask_T: NDArray[np.bool_], *arrays: Floats) -> None:
    for values_T in arrays:
        if values_T.shape != mask_T.shape:
            raise ValueError(
                f"an array of shape {values_T.shape} beside a loss mask of {mask_T.shape}"
            )
