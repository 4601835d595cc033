"""Off-policy correction: what a token's loss is multiplied by because the engine (rollout policy) did not
sample exactly from the old policy (other kernels, another precision, an older version)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from invrl.algorithms.ratios import token_ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Detached weights, float32 [N], and which of them the cap cut, bool [N]."""

    weight_N: Tensor
    capped_N: Tensor


def none(old_N: Tensor, rollout_N: Tensor, cap: float) -> Correction:
    """w = 1."""
    return Correction(weight_N=torch.ones_like(old_N), capped_N=torch.zeros_like(old_N, dtype=torch.bool))


def truncated(old_N: Tensor, rollout_N: Tensor, cap: float) -> Correction:
    """w = min(exp(old - rollout), cap): truncated importance sampling (Ionides 2008), as used against the
    mismatch of sampler and trainer (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training")."""
    weight_N = token_ratio(old_N.detach(), rollout_N.detach())
    return Correction(weight_N=weight_N.clamp(max=cap), capped_N=weight_N > cap)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float], Correction]] = {"none": none, "truncated": truncated}
