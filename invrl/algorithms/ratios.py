"""Importance ratios of one policy to another, at the level at which they are taken (so far: the token)."""

from collections.abc import Callable

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Nats. A difference of log-probs is clamped to [-20, 20] before `exp`: float32 overflows at 88.7, and one
infinite term would cost the whole batch."""


def clamp_log_ratio(difference_N: Tensor) -> Tensor:
    """A difference of log-probs, made safe for `exp`: [N] -> [N]."""
    return difference_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """The ratio of two policies per token, from their log-probs: [N], [N] -> [N].

        r_t = exp(log p_t - log q_t)

    PPO's r_t(theta), arXiv 1707.06347, section 3. The difference is clamped at `LOG_RATIO_BOUND`; beyond it
    the ratio has no gradient.
    """
    log_ratio_N = clamp_log_ratio(numerator_N - denominator_N)
    return log_ratio_N.exp()


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratio}
