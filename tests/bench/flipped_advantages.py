"""Negative controls that push down what is rewarded: `--advantage tests.bench.flipped_advantages:NAME`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages import ADVANTAGES


def grpo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    return -ADVANTAGES["grpo"](rewards_G, eps=eps)


def rloo(rewards_G: NDArray[np.float64], *, eps: float) -> NDArray[np.float64]:
    return -ADVANTAGES["rloo"](rewards_G, eps=eps)
