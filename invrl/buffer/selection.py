"""Selection: whether what is trained looks like what was asked for.

A rollout that is lost, because its group was dropped for its age or for a failure, was
asked for as much as one that is trained. If mainly long or mainly unrewarded rollouts
are lost, the policy is trained on another distribution than its tasks have. Groups that
a filter drops are not compared: they are left out on purpose, by their rewards.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from invrl.types.metrics import Mean, Metric, Min
from invrl.types.rollouts import RolloutSummary

_WINDOW = 1000
"""Rollouts that are compared: the last ones that were trained or lost."""


@dataclass(frozen=True, slots=True)
class _EndedRollout:
    length: float
    """Sampled tokens. Of a rollout that was cancelled, those until then."""
    reward: float | None
    """None if it was cancelled."""
    is_trained: bool


class Selection:
    """Lengths and rewards of the last rollouts that were trained or lost."""

    def __init__(self) -> None:
        self._ended: deque[_EndedRollout] = deque(maxlen=_WINDOW)

    def note_trained(self, rollout: RolloutSummary) -> None:
        self._ended.append(_EndedRollout(rollout.sampled_tokens, rollout.reward, True))

    def note_lost(self, rollout: RolloutSummary) -> None:
        self._ended.append(_EndedRollout(rollout.sampled_tokens, rollout.reward, False))

    def note_cancelled(self, partial: RolloutSummary) -> None:
        """Note a rollout that ran when its group was dropped."""
        self._ended.append(_EndedRollout(partial.sampled_tokens, None, False))

    def metrics(self) -> dict[str, Metric]:
        """Return, over the last rollouts: `lost_share`; `trained_length_ratio`, the
        mean length of trained rollouts over that of all; `trained_reward_difference`,
        the mean reward of trained rollouts less that of all; and `trained_length_p` and
        `trained_reward_p`, the probability of a difference between trained and lost
        ones as large as this if they came from one distribution. Empty while nothing
        was trained."""
        lengths = [ended.length for ended in self._ended]
        trained_lengths = [ended.length for ended in self._ended if ended.is_trained]
        if not trained_lengths:
            return {}
        lost_lengths = [ended.length for ended in self._ended if not ended.is_trained]
        trained_rewards: list[float] = []
        lost_rewards: list[float] = []
        for ended in self._ended:
            if ended.reward is not None:
                rewards = trained_rewards if ended.is_trained else lost_rewards
                rewards.append(ended.reward)
        all_rewards = trained_rewards + lost_rewards
        reward_difference = float(np.mean(trained_rewards) - np.mean(all_rewards))
        mean_length = float(np.mean(lengths))
        return {
            "lost_share": Mean(len(lost_lengths), len(lengths)),
            "trained_length_ratio": Mean(float(np.mean(trained_lengths)), mean_length),
            "trained_reward_difference": Mean(reward_difference),
            "trained_length_p": Min(same_distribution(trained_lengths, lost_lengths)),
            "trained_reward_p": Min(same_distribution(trained_rewards, lost_rewards)),
        }


def same_distribution(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test, by the distribution
    of its statistic for large samples (Smirnov 1948); 1 if a sample is empty."""
    if not first or not second:
        return 1.0
    from scipy.special import kolmogorov  # a second, only where rollouts were lost

    values = np.sort(np.concatenate([first, second]))
    shares_first = np.searchsorted(np.sort(first), values, side="right") / len(first)
    shares_second = np.searchsorted(np.sort(second), values, side="right") / len(second)
    distance = float(np.max(np.abs(shares_first - shares_second)))
    effective_size = len(first) * len(second) / (len(first) + len(second))
    return float(kolmogorov(np.sqrt(effective_size) * distance))
