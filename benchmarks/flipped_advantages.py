"""Negative controls that push down what is rewarded.

`--advantage benchmarks.flipped_advantages:NAME` where advantages are a function of a
group's rewards, `--policy-loss benchmarks.flipped_advantages:clip` where the trainer
computes them token by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages.advantages import ADVANTAGES
from invrl.algorithms.policy_loss import policy_losses

if TYPE_CHECKING:
    from torch import Tensor


def grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    return -ADVANTAGES["grpo"](rewards_G, eps=eps)


def rloo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    return -ADVANTAGES["rloo"](rewards_G, eps=eps)


def clip(
    ratio_N: Tensor, advantages_N: Tensor, *, eps_clip_low: float, eps_clip_high: float
) -> Tensor:
    """The built-in `clip` without a dual clip, of minus the advantages: those of a
    critic with the KL in them, or minus the reverse KL of distillation. The critic's
    own returns keep their sign."""
    return policy_losses.clip(
        ratio_N, -advantages_N, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
