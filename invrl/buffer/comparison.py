"""Which rewards of a group are compared with each other. Pure, from ids and rewards alone.

A reward is compared with rewards of its own kind: final ones with the group's final rewards, those of turns
with those of turns, of branches with those of branches, of child sessions with those of child sessions. Among
final rewards a small reward of a turn would look like a failure in a solved group, and like a success in a
failed one, whatever the turn was worth.

Batching takes advantages from these comparisons, and the zero-variance filter asks whether any of them
differs, so both agree on what teaches something."""

from collections.abc import Iterator
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
    """What a reward was given to. `id`: of a session (final, child), or of a turn (branch, turn)."""

    kind: RewardKind
    id: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """Rewards that are compared with each other, float64 [R], and whose they are."""

    owners: tuple[RewardOwner, ...]
    rewards_R: NDArray[np.float64]

    @property
    def differs(self) -> bool:
        return rewards_differ(self.rewards_R)


def comparisons(group: Group, baseline: RewardBaseline) -> list[Comparison]:
    """The final rewards of the group, in the order of its members, and then one comparison per kind of the
    others; per kind and level with the baseline "depth"."""
    finals = [RewardOwner("final", member.session_id) for member in group.rollouts_G]
    rewards = [member.reward for member in group.rollouts_G]
    found = [Comparison(owners=tuple(finals), rewards_R=np.array(rewards, np.float64))]
    others: dict[tuple[RewardKind, str], dict[RewardOwner, float]] = {}
    for member in group.rollouts_G:
        for owner, level, reward in _own_rewards(member):
            key = (owner.kind, level if baseline == "depth" else "")
            others.setdefault(key, {})[owner] = reward
    for members in others.values():
        values = np.array(list(members.values()), np.float64)
        found.append(Comparison(owners=tuple(members), rewards_R=values))
    return found


def child_owner(summary: RolloutSummary, session_id: str) -> RewardOwner:
    """Whose reward the turns of a session have, where neither turn nor branch has one of its own."""
    if session_id not in summary.child_rewards:
        return RewardOwner("final", summary.session_id)
    bearer = summary.child_reward_from.get(session_id, session_id)
    if bearer == summary.session_id:
        return RewardOwner("final", bearer)
    return RewardOwner("child", bearer)


def _own_rewards(summary: RolloutSummary) -> Iterator[tuple[RewardOwner, str, float]]:
    """Every reward but the final one: whose, its level, and what it is. Inherited ones are not rewards of
    their own."""
    for session_id, reward in summary.child_rewards.items():
        owner = child_owner(summary, session_id)
        if owner.id == session_id:
            yield owner, "", reward
    for turn_id, reward in summary.branch_rewards.items():
        yield RewardOwner("branch", turn_id), summary.turn_levels.get(turn_id, ""), reward
    for turn_id, reward in summary.turn_rewards.items():
        yield RewardOwner("turn", turn_id), summary.turn_levels.get(turn_id, ""), reward
