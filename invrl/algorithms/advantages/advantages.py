"""Advantages: one number per reward, computed from the rewards it is compared with.

Computed in NumPy float64, once per batch, before sharding. A final reward is compared
with those of its group, the rollouts of one task; for `reinforce`, with those of the
whole batch. A rollout that became several samples is one entry of `rewards_G`, so it
counts once in the baseline. The step before is in `reward_shaping.py`, the one after,
over the batch, in `whitening.py`; advantages that need a critic are in
`token_advantages.py`.

| name | advantage | then |
|---|---|---|
| grpo | (r - mean) / (std + eps) | |
| dr_grpo | r - mean | |
| rloo | r - mean of the others | |
| maxrl | (r - mean) / mean of r above 0 | |
| pass_at_k | of the best of k | |
| raw | r | |
| reinforce | r - mean of the batch | |
| reinforce_pp | r | whitened over the batch's tokens |
| reinforce_pp_baseline | r - mean | whitened over the batch's tokens |

Invariant: except with `raw`, equal rewards have advantages of exactly 0, not of
rounding errors, because Adam turns the smallest gradient into a full step.
"""

from functools import partial
from math import comb

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.config import DEFAULT_PASS_AT_K, AlgorithmConfig
from invrl.algorithms.tables import Deviation
from invrl.interfaces import AdvantageFn
from invrl.user_code.plugins import load_plugin

ROUNDING = 1e-12
"""Tolerance relative to the largest reward: smaller differences come from the order of
addition."""


def rewards_differ(rewards_G: NDArray[np.float64]) -> bool:
    """Whether some rewards differ by more than `ROUNDING`. rewards_G: [G], G >= 1."""
    return bool(np.ptp(rewards_G) > ROUNDING * np.abs(rewards_G).max())


def grpo(
    rewards_G: NDArray[np.float64],
    *,
    eps: float,
    deviation: Deviation = "sample",
    std_floor: float = 0.0,
) -> NDArray[np.float64]:
    """GRPO's group-relative advantage (arXiv 2402.03300, section 4.1.2): [G] -> [G].

        A_i = (r_i - mean(r)) / (max(std(r), std_floor) + eps)

    The paper does not say which deviation it means. The sample's divides the sum of
    squares by G - 1 (Bessel), the population's by G. The advantage of a single reward
    is 0. The floor is ours: it keeps a group whose rewards hardly differ from being
    scaled up to the size of the others; 0 is the paper's formula.
    """
    centred_G = dr_grpo(rewards_G, eps=eps)
    if not rewards_differ(rewards_G):
        return centred_G
    degrees_of_freedom = len(centred_G)
    if deviation == "sample":
        degrees_of_freedom -= 1
    variance = np.sum(centred_G**2) / max(degrees_of_freedom, 1)
    return centred_G / (max(np.sqrt(variance), std_floor) + eps)


def dr_grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """Dr. GRPO's advantage (arXiv 2503.20783): [G] -> [G].

        A_i = r_i - mean(r)

    It omits the division by the deviation, which overweights tasks that are nearly
    solved or nearly hopeless. `eps` is not used. Over the rewards of a whole batch this
    is REINFORCE with the mean as its baseline (Williams 1992).
    """
    if not rewards_differ(rewards_G):
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """REINFORCE leave-one-out (arXiv 2402.14740, section 3.2; Kool et al. 2019): [G] ->
    [G].

        A_i = r_i - sum_{j != i} r_j / (G - 1)  =  G / (G - 1) (r_i - mean(r))

    The advantage of a single reward is 0: it has no baseline. `eps` is not used.
    """
    num_rewards = len(rewards_G)
    if num_rewards == 1:
        return np.zeros_like(rewards_G)
    return dr_grpo(rewards_G, eps=eps) * (num_rewards / (num_rewards - 1))


def maxrl(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """Maximum likelihood RL (arXiv 2602.02710, equation 9 and algorithm 1): [G] -> [G].

        A_i = (r_i - mean(r)) / mean(r+)        r+ = max(r, 0)

    For rewards 0 and 1, in a group with K successes, a success weighs G/K - 1 and a
    failure -1, so rare successes count more. Without a reward above 0 all are 0. The
    paper has rewards of at least 0, for which r+ is r. With negative ones (an overlong
    rollout's, for example) a mean near 0 would not be a success rate; r+ keeps it one,
    and the divisor is at least eps * mean(|r|). The authors' code adds 1e-6 to it.
    """
    if not rewards_differ(rewards_G) or rewards_G.max() <= 0:
        return np.zeros_like(rewards_G)
    # No scale of the rewards changes the result, but the mean of the smallest is 0.
    scaled_G = rewards_G / np.abs(rewards_G).max()
    success_rate = np.maximum(scaled_G, 0).mean()
    return (scaled_G - scaled_G.mean()) / max(
        success_rate, eps * np.abs(scaled_G).mean()
    )


def pass_at_k(
    rewards_G: NDArray[np.float64],
    *,
    eps: float,
    k: int = DEFAULT_PASS_AT_K,
    std_floor: float = 0.0,
) -> NDArray[np.float64]:
    """The advantage of pass@k training (arXiv 2508.10751, equations 11 to 15): [G] ->
    [G].

        R(S) = max_{i in S} r_i          of each subset S of k members
        A_i  = (mean_{S with i} R(S) - mean_S R(S)) / (max(std_S R(S), std_floor) + eps)

    For rewards 0 and 1 these are the paper's closed forms; taking the largest reward
    extends them to all others. Computed over all subsets at once from binomial
    coefficients. k = 1 is `grpo` with the population's deviation. In a group of k or
    fewer, every advantage is 0: there is one subset at most.
    """
    num_rewards = len(rewards_G)
    if num_rewards <= k:
        return np.zeros_like(rewards_G)
    order = np.argsort(rewards_G, kind="stable")
    sorted_G = rewards_G[order]
    if not rewards_differ(sorted_G[k - 1 :]):  # every subset has the same best reward
        return np.zeros_like(rewards_G)
    sorted_G = sorted_G - sorted_G.mean()
    ranks = range(num_rewards)
    num_subsets = comb(num_rewards, k)
    is_best_G = np.array([comb(rank, k - 1) / num_subsets for rank in ranks])
    mean = np.sum(is_best_G * sorted_G)
    variance = np.sum(is_best_G * (sorted_G - mean) ** 2)

    num_with_member = comb(num_rewards - 1, k - 1)
    member_is_best_G = np.array([comb(rank, k - 1) / num_with_member for rank in ranks])
    better_is_best_G = np.zeros(num_rewards)
    if k > 1:
        better_is_best_G[1:] = [
            comb(rank - 1, k - 2) / num_with_member for rank in ranks[1:]
        ]
    weighted_G = better_is_best_G * sorted_G
    better_sum_G = np.cumsum(weighted_G[::-1])[::-1] - weighted_G
    mean_with_member_G = member_is_best_G * sorted_G + better_sum_G

    advantages_G = np.empty_like(sorted_G)
    advantages_G[order] = (mean_with_member_G - mean) / (
        max(np.sqrt(variance), std_floor) + eps
    )
    return advantages_G


def raw(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """The reward itself, without a baseline (REINFORCE, Williams 1992): [G] -> [G].
    `eps` is not used."""
    return rewards_G.copy()


def left_to_trainer(
    rewards_G: NDArray[np.float64], *, eps: float
) -> NDArray[np.float64]:
    """Return 0 for each advantage that the trainer computes from token rewards: [G] ->
    [G]. `eps` is not used."""
    return np.zeros_like(rewards_G)


ADVANTAGES: dict[str, AdvantageFn] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "pass_at_k": pass_at_k,
    "raw": raw,
    "reinforce": dr_grpo,
    "reinforce_pp": raw,
    "reinforce_pp_baseline": dr_grpo,
    "gae": left_to_trainer,
}


def advantage_function(
    name: str,
    deviation: Deviation = "sample",
    *,
    std_floor: float = 0.0,
    k: int = DEFAULT_PASS_AT_K,
) -> AdvantageFn:
    """Return the built-in of that name (grpo and pass_at_k with these settings), or the
    user's function at `module:name`. Raises PluginError."""
    function = load_plugin(name, "advantage", AdvantageFn, ADVANTAGES)
    if function is grpo and (deviation != "sample" or std_floor):
        return partial(grpo, deviation=deviation, std_floor=std_floor)
    if function is pass_at_k:
        return partial(pass_at_k, k=k, std_floor=std_floor)
    return function


def configured_advantage(config: AlgorithmConfig) -> AdvantageFn:
    """Return the function that the settings name. Raises PluginError."""
    return advantage_function(
        config.advantage,
        config.advantage_std.estimator,
        std_floor=config.advantage_std.floor,
        k=config.pass_at_k,
    )
