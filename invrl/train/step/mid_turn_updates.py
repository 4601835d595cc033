"""Turns during which the weights changed, and their tokens from the newer weights.

With `weight_update_inflight` `in_place` a running request keeps the keys and values
that older weights computed. So the engine's log-probs of these tokens belong to no
single version, and the trainer, which computes the whole sample with one version, gets
others. The difference is reported with every step as `logprob_gap_after_update_mean`
and `_max`, in nats; with `retract` and `drain` it is the same rounding as for all other
tokens.
"""

import numpy as np
from numpy.typing import NDArray

from invrl.types import TrainSample, WeightVersion


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
