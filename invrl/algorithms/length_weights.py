"""Weights of token losses by the length of a rollout within its group (lambda-GRPO).

A factor on top of the aggregation, with one exponent, lambda, for the whole run, which
may be learned. Pure NumPy in float64, so every rank computes the same numbers.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TrainedCounts

LENGTH_WEIGHT = "length_weight"
"""Number of a sample that multiplies its token losses."""
LENGTH_SLOPE = "length_slope"
"""Derivative of that number with respect to lambda."""
LAMBDA_GRADIENT = "length_lambda_gradient"
"""Metric of a micro-batch: its part of dL/dlambda."""
_EPS = 1e-8
"""Added to the deviation of the lengths."""
_SMALLEST_BASE = 1e-6
"""Replaces an h_i that is not above 0, whose power would not be a number."""
_LARGEST_LOG_POWER = 50.0
"""Bound of h_i^lambda. Above it the softmax is 1 for one rollout and 0 for the
others."""


def largest_scale(group_size: int) -> float:
    """Smallest r at which a rollout of such a group may have h_i = 0: sqrt(G) / (G -
    1), because no z_i is below -(G - 1) / sqrt(G). `group_size` is 2 or more."""
    return float(np.sqrt(group_size)) / (group_size - 1)


def group_weights(
    lengths_G: NDArray[np.float64], exponent: float, scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weights f_i [G] of a group's rollouts, whose mean is 1, and their derivatives
    df_i/dlambda [G].

        z_i = (|o_i| - mean_j |o_j|) / (std_j |o_j| + 1e-8)
        h_i = 1 + r z_i
        f_i = G exp(h_i^lambda) / sum_j exp(h_j^lambda)

    `lengths_G`: |o_i|, in trained tokens; `exponent`: lambda; `scale`: r. With lambda =
    0, in a group of one and among equal lengths every weight is exactly 1. With lambda
    above 0 long rollouts count more, below 0 short ones.

    lambda-GRPO (arXiv 2510.06870, section 2.3, as reviews and the reimplementation
    grpo-composer give it). The deviation is the sample's (G - 1), as in grpo-composer,
    whose softmax is the same but has no bounds.
    """
    num_rollouts = len(lengths_G)
    deviation = lengths_G.std(ddof=1) if num_rollouts > 1 else 0.0
    z_G = (lengths_G - lengths_G.mean()) / (deviation + _EPS)
    log_h_G = np.log((1.0 + scale * z_G).clip(min=_SMALLEST_BASE))
    power_G = np.exp((exponent * log_h_G).clip(max=_LARGEST_LOG_POWER))
    exp_G = np.exp(power_G - power_G.max())
    weights_G = exp_G / exp_G.mean()
    power_slopes_G = power_G * log_h_G
    slopes_G = weights_G * (power_slopes_G - (weights_G * power_slopes_G).mean())
    return weights_G, slopes_G


def length_numbers(
    trained: TrainedCounts, *, exponent: float, scale: float
) -> Mapping[str, Mapping[str, float]]:
    """Return the numbers `LENGTH_WEIGHT` and `LENGTH_SLOPE` of the samples of each
    rollout with a trained token, by rollout id.

    A rollout counts once, with the trained tokens of all its samples. A mini-batch
    holds whole groups, so `trained` suffices, whatever ranks the samples are on.
    """
    rollouts_of_group: dict[str, list[str]] = {}
    for rollout_id, group_id in trained.group_of_rollout.items():
        rollouts_of_group.setdefault(group_id, []).append(rollout_id)
    numbers: dict[str, Mapping[str, float]] = {}
    for rollout_ids in rollouts_of_group.values():
        lengths_G = np.array(
            [trained.tokens_of_rollout[rollout_id] for rollout_id in rollout_ids],
            np.float64,
        )
        weights_G, slopes_G = group_weights(lengths_G, exponent, scale)
        for rollout_id, weight, slope in zip(
            rollout_ids, weights_G, slopes_G, strict=True
        ):
            numbers[rollout_id] = {
                LENGTH_WEIGHT: float(weight),
                LENGTH_SLOPE: float(slope),
            }
    return numbers
