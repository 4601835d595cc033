"""Whitening: shifts and scales numbers to mean 0 and deviation 1 over a whole batch.

The statistics are sums, so those of parts (samples, ranks) can be added. Pure NumPy,
float64.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.config import WhitenedOver

ROUNDING = 1e-12
"""Tolerance relative to the mean square: a smaller variance comes from the order of
addition."""
VARIANCE_EPS = 1e-8
"""Added to the variance, as TRL's and verl's `masked_whiten` do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Weighted sums over some numbers; `+` merges two parts."""

    count: float = 0.0
    """Sum of the weights."""
    total: float = 0.0
    squares: float = 0.0

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            count=self.count + other.count,
            total=self.total + other.total,
            squares=self.squares + other.squares,
        )

    @staticmethod
    def of(
        values_N: NDArray[np.floating], weights_N: NDArray[np.floating] | None = None
    ) -> "Moments":
        """Compute the moments of values [N], N >= 0, with optional weights [N]."""
        values_N = np.asarray(values_N, np.float64)
        if weights_N is None:
            weights_N = np.ones_like(values_N)
        return Moments(
            count=float(np.sum(weights_N)),
            total=float(np.sum(weights_N * values_N)),
            squares=float(np.sum(weights_N * values_N**2)),
        )

    @property
    def mean(self) -> float:
        """Weighted mean; 0 without values."""
        if not self.count:
            return 0.0
        return self.total / self.count

    @property
    def variance(self) -> float:
        """Sample variance: divided by count - 1. 0 for at most one value, and exactly 0
        for equal values."""
        if self.count <= 1:
            return 0.0
        centred_squares = self.squares - self.total**2 / self.count
        if centred_squares <= ROUNDING * self.squares:
            return 0.0
        return centred_squares / (self.count - 1)


def whiten(
    values_N: NDArray[np.floating],
    moments: Moments,
    *,
    std_floor: float = 0.0,
) -> NDArray[np.float64]:
    """Whiten values with the moments of their whole batch: [N] -> float64 [N].

        w = (x - mean) / max(sqrt(variance + 1e-8), std_floor)

    This is `masked_whiten` of TRL (PPO) and verl, except for the floor, which is ours.
    Equal values become exactly 0.
    """
    values_N = np.asarray(values_N, np.float64)
    variance = moments.variance
    if not variance:
        return np.zeros_like(values_N)
    deviation = max(np.sqrt(variance + VARIANCE_EPS), std_floor)
    return (values_N - moments.mean) / deviation


def whiten_samples(
    samples: Sequence[NDArray[np.float64]],
    masks: Sequence[NDArray[np.bool_]],
    rollout_ids: Sequence[str],
    *,
    over: WhitenedOver,
    std_floor: float = 0.0,
) -> list[NDArray[np.float64]]:
    """Whiten the advantages of a batch, one array [T] and one loss mask [T] per sample.
    Untrained tokens do not count and are 0.

    Over "tokens", each trained token of the batch counts once (REINFORCE++, arXiv
    2501.03262, equation 10; as verl and OpenRLHF compute it). Over "rollouts", each
    rollout does, however many tokens and samples it has (RLOO with normalised
    advantages in TRL). "none" changes nothing.
    """
    if over == "none":
        return list(samples)
    weights = [1.0] * len(samples)
    if over == "rollouts":
        tokens_of_rollout = _trained_tokens(masks, rollout_ids)
        weights = [
            1 / max(tokens_of_rollout[rollout_id], 1) for rollout_id in rollout_ids
        ]
    moments = Moments()
    for sample_T, mask_T, weight in zip(samples, masks, weights, strict=True):
        trained_N = sample_T[mask_T]
        moments += Moments.of(trained_N, np.full_like(trained_N, weight))
    whitened: list[NDArray[np.float64]] = []
    for sample_T, mask_T in zip(samples, masks, strict=True):
        whitened.append(
            np.where(mask_T, whiten(sample_T, moments, std_floor=std_floor), 0.0)
        )
    return whitened


def _trained_tokens(
    masks: Iterable[NDArray[np.bool_]], rollout_ids: Iterable[str]
) -> dict[str, int]:
    """Count the trained tokens by rollout id."""
    tokens: dict[str, int] = {}
    for mask_T, rollout_id in zip(masks, rollout_ids, strict=True):
        tokens[rollout_id] = tokens.get(rollout_id, 0) + int(mask_T.sum())
    return tokens
