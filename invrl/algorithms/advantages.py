"""Advantages: one number per reward from the rewards that it is compared with. NumPy float64, once per batch,
before sharding. A final reward is compared with those of its group, the rollouts of one task. A rollout that
became several training rows is one entry of `rewards_G`, so it counts once in the baseline.

Invariant: rewards that do not differ have advantages of exactly 0, not of rounding errors, because Adam makes
a whole step of the smallest gradient."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.config import Deviation
from invrl.interfaces import AdvantageFn
from invrl.plugins import load_plugin

ROUNDING = 1e-12
"""Rewards that differ by less, relative to the largest, differ by the order in which they were added up."""


def rewards_differ(rewards_G: NDArray[np.float64]) -> bool:
    """By more than `ROUNDING`; rewards_G: [G], at least one."""
    return bool(np.ptp(rewards_G) > ROUNDING * np.abs(rewards_G).max())


def grpo(
    rewards_G: NDArray[np.float64], *, eps: float, deviation: Deviation = "sample"
) -> NDArray[np.float64]:
    """A = (r - mean(r)) / (std(r) + eps): group-relative advantage of GRPO, arXiv 2402.03300, section 4.1.2.
    The paper does not say which deviation: the sample's divides the squares by G - 1 (Bessel), the
    population's by G. Of a single reward: 0. rewards_G and result: [G]."""
    centred_G = dr_grpo(rewards_G, eps=eps)
    if not rewards_differ(rewards_G):
        return centred_G
    freedom = len(centred_G) - 1 if deviation == "sample" else len(centred_G)
    variance = np.sum(centred_G**2) / max(freedom, 1)
    return centred_G / (np.sqrt(variance) + eps)


def dr_grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """A = r - mean(r): no division by the deviation, which over-weights tasks that are nearly solved or
    nearly hopeless (Dr. GRPO, arXiv 2503.20783). `eps` is not used. rewards_G and result: [G]."""
    return rewards_G - rewards_G.mean() if rewards_differ(rewards_G) else np.zeros_like(rewards_G)


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "dr_grpo": dr_grpo}


def advantage_function(name: str, deviation: Deviation = "sample") -> AdvantageFn:
    """The built-in of that name, grpo with this deviation, or the user's function at `module:name`. Raises
    PluginError."""
    function = load_plugin(name, "advantage", AdvantageFn, ADVANTAGES)
    if function is grpo and deviation == "population":
        return partial(grpo, deviation="population")
    return function
