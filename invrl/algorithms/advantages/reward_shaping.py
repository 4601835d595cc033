"""Reward shaping: terms added to a rollout's final reward before it becomes an
advantage.

The recorded reward stays as the environment gave it. Rewards of turns, trajectories and
child sessions are not shaped. Lengths are the tokens that a rollout sampled, over all
its turns. Pure NumPy, float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def soft_overlong_punishment(
    lengths_G: NDArray[np.integer], *, max_length: int, buffer: int
) -> NDArray[np.float64]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): lengths [G] ->
    [G], from -1 to 0.

        0                                       length <= max_length - buffer
        ((max_length - buffer) - length) / buffer    up to max_length
        -1                                      beyond

    buffer >= 1. TRL's `get_soft_overlong_punishment` is the same. verl's DAPO reward
    manager has no bound at -1, which matters only for answers beyond max_length.
    """
    excess_G = lengths_G - (max_length - buffer)
    return -np.clip(excess_G / buffer, 0.0, 1.0)


def length_reward(
    lengths_G: NDArray[np.integer], is_correct_G: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) within one
    group: [G], [G] -> [G].

        lambda_i = 0.5 - (length_i - min) / (max - min) lambda_i for a correct answer,
        min(0, lambda_i) for another; 0 for all if max = min

    Short correct answers gain up to 0.5, long answers lose up to 0.5, and wrong ones
    never gain.
    """
    shortest = lengths_G.min()
    longest = lengths_G.max()
    if shortest == longest:
        return np.zeros(len(lengths_G))
    lambda_G = 0.5 - (lengths_G - shortest) / (longest - shortest)
    return np.where(is_correct_G, lambda_G, np.minimum(lambda_G, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Added terms with their weights."""

    overlong_length: int = 0
    """Tokens that a rollout may sample."""
    overlong_buffer: int = 0
    """Number of the last of these tokens, over which the punishment grows; 0: no
    punishment."""
    overlong_penalty: float = 1.0
    length_penalty: float = 0.0
    """Weight of `length_reward`; 0: none. An answer is correct if its reward is above
    0."""

    @property
    def acts(self) -> bool:
        return bool(self.overlong_buffer and self.overlong_penalty) or bool(
            self.length_penalty
        )

    def terms(
        self, rewards_G: NDArray[np.float64], lengths_G: NDArray[np.integer]
    ) -> NDArray[np.float64]:
        """Return the terms added to each reward of a group: [G], G >= 1."""
        terms_G = np.zeros(len(rewards_G))
        if self.overlong_buffer:
            punishment_G = soft_overlong_punishment(
                lengths_G, max_length=self.overlong_length, buffer=self.overlong_buffer
            )
            terms_G += self.overlong_penalty * punishment_G
        if self.length_penalty:
            terms_G += self.length_penalty * length_reward(lengths_G, rewards_G > 0)
        return terms_G
