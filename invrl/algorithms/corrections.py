"""Off-policy correction: the weight of a token's loss, because the engine did not sample from the old policy.

The engine (the rollout policy) differs from the old policy of the trainer by other kernels, another precision
or an older weight version.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from invrl.algorithms.ratios import token_ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """The weight of each token."""

    weight_N: Tensor
    """float32 [N], detached."""
    capped_N: Tensor
    """bool [N]: whether the cap reduced the weight."""


def none(old_N: Tensor, rollout_N: Tensor, cap: float) -> Correction:
    """w_t = 1."""
    weight_N = torch.ones_like(old_N)
    capped_N = torch.zeros_like(old_N, dtype=torch.bool)
    return Correction(weight_N=weight_N, capped_N=capped_N)


def truncated(old_N: Tensor, rollout_N: Tensor, cap: float) -> Correction:
    """Truncated importance sampling (Ionides 2008), from log-probs [N], [N].

        w_t = min(exp(old_t - rollout_t), cap)

    Used against the mismatch of sampler and trainer by Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training".
    """
    ratio_N = token_ratio(old_N.detach(), rollout_N.detach())
    return Correction(weight_N=ratio_N.clamp(max=cap), capped_N=ratio_N > cap)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float], Correction]] = {
    "none": none,
    "truncated": truncated,
}
