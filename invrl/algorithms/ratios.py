"""Importance ratios of one policy to another, at the level (token, later sequence) that they are taken."""

from collections.abc import Callable

from torch import Tensor


def token_ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    """exp(log p - log q) per token: [N], [N] -> [N]. PPO's r_t(theta), arXiv 1707.06347, section 3.
    Not clamped: a ratio that overflows float32 makes a non-finite loss, which the trainer refuses."""
    return (numerator_N - denominator_N).exp()


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": token_ratio}
