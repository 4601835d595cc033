"""Advantages: one number per reward, from the rewards that it is compared with.

Computed in NumPy float64, once per batch, before sharding. A final reward is compared with those of its
group: the rollouts of one task. A rollout that became several training rows is one entry of `rewards_G`, so
it counts once in the baseline.

Invariant: rewards that do not differ have advantages of exactly 0, not of rounding errors, because Adam makes
a whole step of the smallest gradient.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.config import Deviation
from invrl.interfaces import AdvantageFn
from invrl.plugins import load_plugin

ROUNDING = 1e-12
"""Relative to the largest reward: smaller differences come from the order in which numbers were added."""


def rewards_differ(rewards_G: NDArray[np.float64]) -> bool:
    """Whether some rewards differ by more than `ROUNDING`. rewards_G: [G], G >= 1."""
    return bool(np.ptp(rewards_G) > ROUNDING * np.abs(rewards_G).max())


def grpo(
    rewards_G: NDArray[np.float64], *, eps: float, deviation: Deviation = "sample"
) -> NDArray[np.float64]:
    """GRPO's group-relative advantage (arXiv 2402.03300, section 4.1.2): [G] -> [G].

        A_i = (r_i - mean(r)) / (std(r) + eps)

    The paper does not say which deviation it means. The sample's divides the sum of squares by G - 1
    (Bessel), the population's by G. The advantage of a single reward is 0.
    """
    centred_G = dr_grpo(rewards_G, eps=eps)
    if not rewards_differ(rewards_G):
        return centred_G
    degrees_of_freedom = len(centred_G)
    if deviation == "sample":
        degrees_of_freedom -= 1
    variance = np.sum(centred_G**2) / max(degrees_of_freedom, 1)
    return centred_G / (np.sqrt(variance) + eps)


def dr_grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """Dr. GRPO's advantage (arXiv 2503.20783): [G] -> [G].

        A_i = r_i - mean(r)

    There is no division by the deviation, which gives too much weight to tasks that are nearly solved or
    nearly hopeless. `eps` is not used.
    """
    if not rewards_differ(rewards_G):
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def left_to_trainer(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    """0 in the place of advantages that the trainer computes with its critic: [G] -> [G]. `eps` is not
    used."""
    return np.zeros_like(rewards_G)


ADVANTAGES: dict[str, AdvantageFn] = {"grpo": grpo, "dr_grpo": dr_grpo, "gae": left_to_trainer}


def advantage_function(name: str, deviation: Deviation = "sample") -> AdvantageFn:
    """The built-in of that name (grpo with this deviation), or the user's function at `module:name`.

    Raises PluginError.
    """
    function = load_plugin(name, "advantage", AdvantageFn, ADVANTAGES)
    if function is grpo and deviation == "population":
        return partial(grpo, deviation="population")
    return function
