"""Advantages: one number per rollout from the rewards of its group. NumPy float64, once per batch, before
sharding; called by `buffer/batching.py`. A group is the rollouts of one task. A rollout that
became several training rows is one entry of `rewards_G`, so it counts once in the baseline."""

import numpy as np
from numpy.typing import NDArray

from invrl.interfaces import AdvantageFn
from invrl.plugins import load_plugin


def grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """A = (r - mean(r)) / (std(r) + eps), std over the population (divided by G, not by G - 1).
    Group-relative advantage of GRPO, arXiv 2402.03300, section 4.1.2. rewards_G and result: [G]."""
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (np.sqrt(np.mean(centred_G**2)) + eps)


def dr_grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """A = r - mean(r): no division by the deviation, which over-weights tasks that are nearly solved or
    nearly hopeless (Dr. GRPO, arXiv 2503.20783). `eps` is not used. rewards_G and result: [G]."""
    return rewards_G - rewards_G.mean()


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "dr_grpo": dr_grpo}


def advantage_function(name: str) -> AdvantageFn:
    """The built-in of that name, or the user's function at `module:name`. Raises PluginError."""
    return load_plugin(name, "advantage", AdvantageFn, ADVANTAGES)
