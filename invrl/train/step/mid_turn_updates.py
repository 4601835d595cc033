"""Turns during which the weights changed: which of their tokens the newer weights
sampled.

With `weights.inflight` `in_place` a running request keeps the keys and values
that older weights computed. So what the engine says of these tokens is of no version
alone, and the trainer, which computes the whole sample with one version, gets other
log-probs. The difference is reported with every step as `logprob_gap_after_update_mean`
and `_max`, in nats; with `retract` and `drain` it is the same rounding as for all other
tokens.
"""

import numpy as np
from numpy.typing import NDArray

from invrl.types.batches import TrainSample
from invrl.types.weights import WeightVersion


def sampled_after_update(
    sample: TrainSample, version: WeightVersion
) -> NDArray[np.bool_]:
    """Return [T]: the tokens that `version` sampled in a turn that an older version
    began."""
    sampled_T = sample.loss_mask_T
    starts_T = sampled_T & ~np.concatenate([[False], sampled_T[:-1]])
    # of each run of sampled tokens, which is a turn
    first_versions = sample.versions_T[starts_T]
    turn_T = np.cumsum(starts_T) - 1
    after_update_T = np.zeros(len(sampled_T), np.bool_)
    by_version_T = sampled_T & (sample.versions_T == version)
    after_update_T[by_version_T] = first_versions[turn_T[by_version_T]] < version
    return after_update_T
