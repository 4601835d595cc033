"""Estimators of KL divergence from the log-probs of sampled tokens."""

import torch
from torch import Tensor

from invrl.algorithms.ratios import clamp_log_ratio


def k3(policy_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimates KL(policy || other) per token, in nats, from samples of `policy`: [N], [N] -> [N].

        k3 = exp(d) - d - 1,    d = other - policy

    Unbiased and never negative. J. Schulman, "Approximating KL divergence" (2020); the KL term of GRPO (arXiv
    2402.03300, eq. 4). d is clamped at `ratios.LOG_RATIO_BOUND`. Computed with expm1, because near d = 0 the
    plain form loses every digit in float32.
    """
    difference_N = clamp_log_ratio(other_N - policy_N)
    return torch.expm1(difference_N) - difference_N
