"""Selects the rewards of a group that are compared with each other. Pure: it needs only
ids and rewards.

A reward is compared with rewards of its own kind: final rewards with the group's final
rewards, rewards of turns with those of turns, of trajectories with those of
trajectories, of child sessions with those of child sessions. Compared with final
rewards, a turn's small reward would look like a failure in a solved group and like a
success in a failed one, whatever its merit.

`training_samples.py` computes advantages from these comparisons, and the zero-variance
filter checks whether the rewards of any of them differ. So both agree on which groups
can teach something.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages.advantages import rewards_differ
from invrl.buffer.config import RewardBaseline
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.turns import Turn

RewardKind = Literal["final", "child", "branch", "turn"]


@dataclass(frozen=True, slots=True)
class RewardOwner:
    """Owner of a reward. `id` is a session's (final, child) or a turn's (branch,
    turn)."""

    kind: RewardKind
    id: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Rewards that are compared with each other, float64 [R], and their owners in the
    same order."""

    owners: tuple[RewardOwner, ...]
    rewards_R: NDArray[np.float64]

    @property
    def differs(self) -> bool:
        return rewards_differ(self.rewards_R)


def comparisons(group: Group, baseline: RewardBaseline) -> list[Comparison]:
    """Return the comparison of the group's final rewards, in the order of its members,
    then one for each other kind of reward; with the baseline "depth", one for each kind
    and level."""
    return batch_comparisons([group], baseline)


def batch_comparisons(
    groups: Iterable[Group], baseline: RewardBaseline
) -> list[Comparison]:
    """Return the comparisons of the rewards of all groups, like `comparisons`. Empty
    without a rollout."""
    final: dict[RewardOwner, float] = {}
    others: dict[tuple[RewardKind, str], dict[RewardOwner, float]] = {}
    for group in groups:
        for member in group.rollouts_G:
            final[RewardOwner("final", member.session_id)] = member.reward
            for owner, level, reward in _own_rewards(member):
                if baseline != "depth":
                    level = ""
                others.setdefault((owner.kind, level), {})[owner] = reward
    if not final:
        return []
    return [_comparison(reward_of) for reward_of in (final, *others.values())]


def trajectory_owners(
    summary: RolloutSummary, turns: Sequence[Turn]
) -> list[RewardOwner]:
    """Return the owners of rewards that count for all tokens of a trajectory, from the
    whole rollout to the most specific one. Rewards of single turns are excluded."""
    owners = [RewardOwner("final", summary.session_id)]
    session_owner = child_owner(summary, turns[0].session_id)
    if session_owner.kind == "child":
        owners.append(session_owner)
    rewarded_ids = [turn.id for turn in turns if turn.id in summary.branch_rewards]
    if rewarded_ids:
        owners.append(RewardOwner("branch", rewarded_ids[-1]))
    return owners


def owned_reward(summary: RolloutSummary, owner: RewardOwner) -> float:
    """Return the reward of one of the rollout's `trajectory_owners`."""
    if owner.kind == "branch":
        return summary.branch_rewards[owner.id]
    if owner.kind == "child":
        return summary.child_rewards[owner.id]
    return summary.reward


def child_owner(summary: RolloutSummary, session_id: str) -> RewardOwner:
    """Return the owner of the reward that a session's turns have if neither the turn
    nor its trajectory has one."""
    if session_id not in summary.child_rewards:
        return RewardOwner("final", summary.session_id)
    bearer = summary.child_reward_from.get(session_id, session_id)
    if bearer == summary.session_id:
        return RewardOwner("final", bearer)
    return RewardOwner("child", bearer)


def _comparison(reward_of: Mapping[RewardOwner, float]) -> Comparison:
    rewards_R = np.array(list(reward_of.values()), np.float64)
    return Comparison(owners=tuple(reward_of), rewards_R=rewards_R)


def _own_rewards(summary: RolloutSummary) -> Iterator[tuple[RewardOwner, str, float]]:
    """Yield owner, level and value of every reward but the final one. A child session
    that inherits its reward has none."""
    for session_id, reward in summary.child_rewards.items():
        owner = child_owner(summary, session_id)
        if owner.id == session_id:
            yield owner, "", reward
    for turn_id, reward in summary.branch_rewards.items():
        level = summary.turn_levels.get(turn_id, "")
        yield RewardOwner("branch", turn_id), level, reward
    for turn_id, reward in summary.turn_rewards.items():
        level = summary.turn_levels.get(turn_id, "")
        yield RewardOwner("turn", turn_id), level, reward
