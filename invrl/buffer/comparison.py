"""Which rewards of a group are compared with each other. Pure: it needs ids and rewards alone.

A reward is compared with rewards of its own kind: final rewards with the group's final rewards, rewards of
turns with those of turns, of branches with those of branches, of child sessions with those of child sessions.
If a turn's small reward were compared with final rewards, it would look like a failure in a solved group and
like a success in a failed one, whatever the turn was worth.

`training_samples.py` computes advantages from these comparisons, and the zero-variance filter asks whether
the rewards of any of them differ. So both agree on which groups can teach something."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages import rewards_differ
from invrl.buffer.config import RewardBaseline
from invrl.types import Group, RolloutSummary

RewardKind = Literal["final", "child", "branch", "turn"]


@dataclass(frozen=True, slots=True)
class RewardOwner:
    """What a reward was given to. `id` is a session's (final, child) or a turn's (branch, turn)."""

    kind: RewardKind
    id: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Rewards that are compared with each other, float64 [R], and their owners in the same order."""

    owners: tuple[RewardOwner, ...]
    rewards_R: NDArray[np.float64]

    @property
    def differs(self) -> bool:
        return rewards_differ(self.rewards_R)


def comparisons(group: Group, baseline: RewardBaseline) -> list[Comparison]:
    """First the group's final rewards, in the order of its members. Then one comparison for each other kind
    of reward; with the baseline "depth", one for each kind and level."""
    owners = [RewardOwner("final", member.session_id) for member in group.rollouts_G]
    rewards = [member.reward for member in group.rollouts_G]
    result = [_comparison(owners, rewards)]
    others: dict[tuple[RewardKind, str], dict[RewardOwner, float]] = {}
    for member in group.rollouts_G:
        for owner, level, reward in _own_rewards(member):
            if baseline != "depth":
                level = ""
            others.setdefault((owner.kind, level), {})[owner] = reward
    for reward_of in others.values():
        result.append(_comparison(reward_of.keys(), reward_of.values()))
    return result


def child_owner(summary: RolloutSummary, session_id: str) -> RewardOwner:
    """The owner of the reward that a session's turns have if neither the turn nor its branch has its own."""
    if session_id not in summary.child_rewards:
        return RewardOwner("final", summary.session_id)
    bearer = summary.child_reward_from.get(session_id, session_id)
    if bearer == summary.session_id:
        return RewardOwner("final", bearer)
    return RewardOwner("child", bearer)


def _comparison(owners: Iterable[RewardOwner], rewards: Iterable[float]) -> Comparison:
    rewards_R = np.array(list(rewards), np.float64)
    return Comparison(owners=tuple(owners), rewards_R=rewards_R)


def _own_rewards(summary: RolloutSummary) -> Iterator[tuple[RewardOwner, str, float]]:
    """Owner, level and value of every reward but the final one. A child session that inherits its reward has
    none of its own."""
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
