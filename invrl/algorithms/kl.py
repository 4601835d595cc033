"""Estimators of KL divergence from log-probs of sampled tokens."""

import torch
from torch import Tensor

from invrl.algorithms.ratios import clamp_log_ratio


def k3(policy_N: Tensor, other_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = other - policy, [N]: estimates KL(policy || other) under samples of `policy`;
    never negative, unbiased. J. Schulman, "Approximating KL divergence" (2020); GRPO's KL term, arXiv
    2402.03300, eq. 4. d is clamped at `ratios.LOG_RATIO_BOUND`. Computed with expm1: near d = 0 the plain
    form loses every digit in float32."""
    difference_N = clamp_log_ratio(other_N - policy_N)
    return torch.expm1(difference_N) - difference_N
