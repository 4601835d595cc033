"""Surrogates: the loss of one token from its ratio current/old and its advantage. Each is a PolicyLoss.

Torch is not imported here: the driver checks the setting with this module and never holds a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from invrl.interfaces import PolicyLoss
from invrl.plugins import load_plugin

if TYPE_CHECKING:
    from torch import Tensor


def clip(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    dual_clip: float = 0.0,
) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), per token: [N], [N] -> [N].

        L = -min(r A, clamp(r, 1 - low, 1 + high) A)

    The two bounds are separate settings, as in DAPO's clip-higher (arXiv 2503.14476, section 3.1).

    Where A < 0 this has no upper bound: a ratio that has grown costs its whole size. With `dual_clip` c the
    loss of such a token is at most -c A (dual-clip PPO, Ye et al. 2020, arXiv 1912.09729, eq. 5). 0 means no
    such bound.
    """
    clipped_N = ratio_N.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high)
    objective_N = ratio_N * advantages_N
    clipped_objective_N = clipped_N * advantages_N
    losses_N = -objective_N.minimum(clipped_objective_N)
    if not dual_clip:
        return losses_N
    bounded_N = losses_N.minimum(-dual_clip * advantages_N)
    return bounded_N.where(advantages_N < 0, losses_N)


CLIP = "clip"
SURROGATES: dict[str, PolicyLoss] = {CLIP: clip}


def surrogate_function(name: str) -> PolicyLoss:
    """The built-in of that name, or the user's function at `module:name`. Raises PluginError."""
    return load_plugin(name, "policy_loss", PolicyLoss, SURROGATES)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClippedTokens:
    """Which tokens `clip` takes out of the gradient, bool [N] each. A ratio on a bound is not clipped."""

    low_N: Tensor
    """r < 1 - low and A < 0."""
    high_N: Tensor
    """r > 1 + high and A > 0."""
    dual_N: Tensor
    """r > dual_clip and A < 0."""

    @property
    def any_N(self) -> Tensor:
        return self.low_N | self.high_N | self.dual_N


def clipped_tokens(
    ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float, dual_clip: float
) -> ClippedTokens:
    """Which tokens `clip` clips with these settings."""
    negative_N = advantages_N < 0
    positive_N = advantages_N > 0
    dual_bound = dual_clip or float("inf")
    return ClippedTokens(
        low_N=(ratio_N < 1.0 - eps_clip_low) & negative_N,
        high_N=(ratio_N > 1.0 + eps_clip_high) & positive_N,
        dual_N=(ratio_N > dual_bound) & negative_N,
    )
