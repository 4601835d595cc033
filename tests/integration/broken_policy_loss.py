"""User code with a fault: a policy loss whose value is finite and whose gradient is
not."""

from __future__ import annotations

from torch import Tensor


def root_of_zero(
    ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Tensor:
    return (ratio_N - ratio_N.detach()).sqrt() * advantages_N
