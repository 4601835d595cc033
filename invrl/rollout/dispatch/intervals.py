"""Values with their 95 % intervals, and the reward that counts as exact. Pure: the
viewer computes with the same code."""

from dataclasses import dataclass

import numpy as np

EXACT_REWARD = 1.0
"""Reward from which a sample counts as exact."""
_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap_interval(of_tasks_K: np.ndarray, *, seed: int = 0) -> Interval:
    """Return the mean with its 95 % interval: the percentile bootstrap over tasks
    (Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13) with
    10,000 resamples. Each resample draws the counts of the distinct values. Raises
    ValueError without tasks."""
    if len(of_tasks_K) == 0:
        raise ValueError("no tasks were evaluated")
    values, counts = np.unique(of_tasks_K, return_counts=True)
    shares = counts / counts.sum()
    rng = np.random.default_rng(seed)
    # In 100 parts: with as many distinct values as tasks, all resamples at once would
    # take gigabytes.
    sums = [
        rng.multinomial(len(of_tasks_K), shares, _RESAMPLES // 100) @ values
        for _ in range(100)
    ]
    low, high = np.quantile(np.concatenate(sums) / len(of_tasks_K), [0.025, 0.975])
    return Interval(value=float(of_tasks_K.mean()), low=float(low), high=float(high))
