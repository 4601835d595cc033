"""Importance ratios of one policy to another, per token or per sample.

A sample is a sequence: the trained tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.loss_inputs import Samples

LOG_RATIO_BOUND = 20.0
"""Nats. A difference of log-probs is clamped to [-20, 20] before `exp`: float32
overflows at 88.7, and one infinite term would ruin the whole batch."""


def clamp_log_ratio(difference_N: Tensor) -> Tensor:
    """Clamp a difference of log-probs for `exp`: [N] -> [N]."""
    return difference_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """The ratio of two policies per token, from their log-probs: [N], [N] -> [N].

        r_t = exp(log p_t - log q_t)

    PPO's r_t(theta), arXiv 1707.06347, section 3. The difference is clamped at
    `LOG_RATIO_BOUND`; beyond it the ratio has no gradient.
    """
    log_ratio_N = clamp_log_ratio(numerator_N - denominator_N)
    return log_ratio_N.exp()


def sequence_ratio(
    numerator_N: Tensor, denominator_N: Tensor, samples: Samples
) -> Tensor:
    """GSPO's ratio of the token's sample, normalized by its length (arXiv 2507.18071,
    eq. 7): [N], [N] -> [N].

        s_i = exp( mean_t (log p_t - log q_t) )

    All tokens of a sample have the same ratio, and the gradient goes through all of
    them. With the aggregation `sequence_mean` this is GSPO's objective (eq. 5). As
    TRL's level `sequence`. verl's `gspo` has the same value and, with advantages that
    are equal within a row, the same gradient (`sequence_token_ratio`)."""
    sample_mean_R = samples.mean(numerator_N - denominator_N)
    return samples.spread(clamp_log_ratio(sample_mean_R).exp())


def sequence_token_ratio(
    numerator_N: Tensor, denominator_N: Tensor, samples: Samples
) -> Tensor:
    """GSPO-token's ratio (arXiv 2507.18071, section 4.3), from log-probs: [N], [N] ->
    [N].

        s_it = sg[s_i] p_t / sg[p_t]

    sg stops the gradient. The value is that of `sequence_ratio`; the gradient of a
    token's ratio is of that token alone, so that advantages may differ within a row.
    """
    own_N = numerator_N - numerator_N.detach()  # 0, with the gradient
    return sequence_ratio(numerator_N.detach(), denominator_N, samples) * own_N.exp()


def _token_ratio(
    numerator_N: Tensor, denominator_N: Tensor, samples: Samples
) -> Tensor:
    return token_ratio(numerator_N, denominator_N)


RATIOS: dict[str, Callable[[Tensor, Tensor, Samples], Tensor]] = {
    "token": _token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
