"""Surrogates: the loss of one token from its ratio (current/old) and its advantage. Each is a PolicyLoss.
Torch is not imported here: the driver checks the setting with this module, and never holds a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invrl.interfaces import PolicyLoss
from invrl.plugins import load_plugin

if TYPE_CHECKING:
    from torch import Tensor


def clip(ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float) -> Tensor:
    """L = -min(r A, clamp(r, 1 - low, 1 + high) A), all [N]: PPO's clipped objective (arXiv 1707.06347, eq.
    7), the lower and upper bound apart, as DAPO's clip-higher has them (arXiv 2503.14476, section 3.1)."""
    clipped_N = ratio_N.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high)
    return -(ratio_N * advantages_N).minimum(clipped_N * advantages_N)


SURROGATES: dict[str, PolicyLoss] = {"clip": clip}


def surrogate_function(name: str) -> PolicyLoss:
    """The built-in of that name, or the user's function at `module:name`. Raises PluginError."""
    return load_plugin(name, "policy_loss", PolicyLoss, SURROGATES)


def clipped_tokens(
    ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Which tokens the clip takes out of the gradient, bool [N] each. Low: r < 1 - low with A < 0. High:
    r > 1 + high with A > 0. A ratio on the bound is not clipped."""
    low_N = (ratio_N < 1.0 - eps_clip_low) & (advantages_N < 0)
    high_N = (ratio_N > 1.0 + eps_clip_high) & (advantages_N > 0)
    return low_N, high_N
