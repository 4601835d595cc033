"""Estimators of KL divergence from the log-probs of sampled tokens.

The tokens are samples of the policy whose divergence is estimated. With d = log policy
- log other:

| name | estimate | its mean | its gradient, as a term of the loss |
|---|---|---|---|
| k1 | d | KL(policy, other) | 0 in expectation |
| k2 | d^2 / 2 | biased | that of KL(policy, other) |
| k3 | exp(-d) - 1 + d | KL(policy, other) | that of KL(other, policy) |
| unbiased | w k3 | KL(policy, other) | that of KL(policy, other) |

J. Schulman, "Approximating KL divergence" (2020), for the first three. Log-ratios are
clamped at `ratios.LOG_RATIO_BOUND`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from invrl.algorithms.loss_inputs import Samples
from invrl.algorithms.policy_loss.ratios import clamp_log_ratio, token_ratio


def k1(policy_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimate KL(policy || other) per token, in nats, from samples of `policy`: [N],
    [N] -> [N].

        k1 = d

    Its gradient as a term of the loss is 0 in expectation; it belongs in the reward
    (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).
    """
    return clamp_log_ratio(policy_N - other_N)


def k2(policy_N: Tensor, other_N: Tensor) -> Tensor:
    """Like `k1`, with k2 = d^2 / 2. Biased, with the gradient of the divergence."""
    return 0.5 * clamp_log_ratio(policy_N - other_N) ** 2


def k3(policy_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimate KL(policy || other) per token, in nats, from samples of `policy`: [N],
    [N] -> [N].

        k3 = exp(d) - d - 1,    d = other - policy

    Unbiased and never negative. J. Schulman, "Approximating KL divergence" (2020); the
    KL term of GRPO (arXiv 2402.03300, eq. 4). d is clamped at `ratios.LOG_RATIO_BOUND`.
    Computed with expm1, because near d = 0 the plain form loses every digit in float32.
    """
    difference_N = clamp_log_ratio(other_N - policy_N)
    return torch.expm1(difference_N) - difference_N


def unbiased_k3(policy_N: Tensor, other_N: Tensor, sampled_N: Tensor) -> Tensor:
    """DeepSeek-V3.2's estimator (arXiv 2512.02556, eq. 7), from samples of a third
    policy: [N] each -> [N].

        w k3,    w = policy / sampled

    The gradient goes through both factors; together they have the gradient of KL(policy
    || other), also where the policies are the same. `sampled_N` has no gradient:
    log-probs of the policy that sampled, which is the engine's, as in the paper. TRL
    (`use_bias_correction_kl`) and slime (`use_unbiased_kl`) take the trainer's old
    log-probs.
    """
    return token_ratio(policy_N, sampled_N.detach()) * k3(policy_N, other_N)


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
UNBIASED = "unbiased"


def estimate(name: str, policy_N: Tensor, other_N: Tensor, sampled_N: Tensor) -> Tensor:
    """Apply the estimator of that name: one of `ESTIMATORS`, or `unbiased`. [N] each ->
    [N]."""
    if name == UNBIASED:
        return unbiased_k3(policy_N, other_N, sampled_N)
    return ESTIMATORS[name](policy_N, other_N)


def to_go(values_N: Tensor, samples: Samples) -> Tensor:
    """Sum from each token to the end of its sample: [N] -> [N]. In float64, because
    sums of whole samples are subtracted from each other."""
    running_N = values_N.double().cumsum(0)
    end_R = running_N[samples.tokens_R.long().cumsum(0) - 1]
    return (samples.spread(end_R) - running_N + values_N.double()).to(values_N.dtype)
