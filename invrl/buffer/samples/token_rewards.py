"""Rewards of a sample's tokens, for advantages that the trainer computes token by token
(GAE). Pure.

Each sample is a separate episode, which ends at its last trained token. Its
trajectory's reward is placed there, in full on every sample, because every trajectory
reached that end; divided among samples, it would shrink with the number of
trajectories. A turn's reward is placed at the turn's last trained token. If the turn is
not trained, it is placed at the last trained token before the turn's end, and nowhere
if there is none. So the reward of a turn that several trajectories share counts once,
in the sample in which the turn is trained.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from invrl.buffer.config import RewardUse
from invrl.buffer.samples.comparison import owned_reward, trajectory_owners
from invrl.types.rollouts import RolloutSummary
from invrl.types.turns import Turn


def token_rewards(
    summary: RolloutSummary,
    trajectory_turns: Sequence[Turn],
    mask_T: NDArray[np.bool_],
    *,
    use: RewardUse = "replace",
    columns: Iterable[NDArray[np.float32]] = (),
) -> NDArray[np.float32]:
    """Return token rewards, float32 [T], 0 where the loss mask is False.

    `trajectory_turns` are all turns of the sample's trajectory; T may end before the
    last of them. With `use` "replace" the trajectory's reward is its most specific one
    (trajectory, else child session, else the rollout's final one); with "add" it is the
    sum of those. Rewards of turns are intermediate rewards and count with both.
    `columns`, [T] each, are added on trained tokens."""
    rewards_T = np.zeros(len(mask_T), np.float64)
    for column_T in columns:
        rewards_T += np.where(mask_T, column_T, 0.0)
    trained_positions = np.flatnonzero(mask_T)
    if not len(trained_positions):
        return rewards_T.astype(np.float32)
    rewards = [
        owned_reward(summary, owner)
        for owner in trajectory_owners(summary, trajectory_turns)
    ]
    trajectory_reward = sum(rewards) if use == "add" else rewards[-1]
    rewards_T[trained_positions[-1]] += trajectory_reward
    turn_end = 0
    for turn in trajectory_turns:
        turn_end += len(turn.context_ids_T) + len(turn.sampled_ids_T)
        reward = summary.turn_rewards.get(turn.id, 0.0)
        num_before_end = int(np.searchsorted(trained_positions, turn_end))
        if reward and num_before_end:
            rewards_T[trained_positions[num_before_end - 1]] += reward
    return rewards_T.astype(np.float32)
