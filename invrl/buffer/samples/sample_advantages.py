"""Advantages of rewards, and of the tokens that the rewards count for. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from invrl.algorithms.advantages.advantage_rules import AdvantageRules
from invrl.buffer.config import RewardBaseline, RewardUse
from invrl.buffer.samples.comparison import (
    Comparison,
    RewardOwner,
    batch_comparisons,
    comparisons,
    trajectory_owners,
)
from invrl.errors import PluginError
from invrl.interfaces import AdvantageFn, GroupAdvantageFn
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.turns import Turn
from invrl.user_code.plugins import takes_keyword


def batch_advantages(
    groups: Sequence[Group],
    baseline: RewardBaseline,
    advantage_fn: AdvantageFn,
    eps: float,
    rules: AdvantageRules,
) -> dict[RewardOwner, float]:
    """Return the advantage of each reward. Raises PluginError unless the function
    returns one finite number per reward."""
    if rules.over_batch:
        return _group_advantages(
            batch_comparisons(groups, baseline), advantage_fn, eps, None
        )
    advantage_of: dict[RewardOwner, float] = {}
    for group in groups:
        advantage_of.update(
            _group_advantages(comparisons(group, baseline), advantage_fn, eps, group)
        )
    return advantage_of


def _group_advantages(
    compared: Iterable[Comparison],
    advantage_fn: AdvantageFn,
    eps: float,
    group: Group | None,
) -> dict[RewardOwner, float]:
    """Return advantages by owner. `group` is the one whose final rewards are compared
    first; None: rewards of several groups are compared."""
    advantage_of: dict[RewardOwner, float] = {}
    for number, comparison in enumerate(compared):
        of_rollouts = group if number == 0 else None
        advantages = _call_advantage_fn(
            advantage_fn, comparison.rewards_R, eps, of_rollouts
        )
        advantage_of.update(zip(comparison.owners, advantages, strict=True))
    return advantage_of


def _call_advantage_fn(
    advantage_fn: AdvantageFn,
    rewards_R: NDArray[np.float64],
    eps: float,
    group: Group | None,
) -> Sequence[float]:
    """Call the function, with the group if it has a parameter for it. None: the rewards
    are not one per rollout."""
    if takes_keyword(advantage_fn, "group"):
        returned = cast(GroupAdvantageFn, advantage_fn)(rewards_R, eps=eps, group=group)
    else:
        returned = advantage_fn(rewards_R, eps=eps)
    advantages_R = np.asarray(returned, np.float64)
    if advantages_R.shape != rewards_R.shape or not np.isfinite(advantages_R).all():
        name = getattr(advantage_fn, "__name__", repr(advantage_fn))
        reason = f"for rewards {rewards_R.tolist()} it returned {advantages_R.tolist()}"
        fix = "return one finite advantage per reward, also for a single one"
        raise PluginError("advantage", name, reason, fix)
    return advantages_R.tolist()


def token_advantages(
    summary: RolloutSummary,
    turns: Sequence[Turn],
    mask_T: NDArray[np.bool_],
    advantage_of: Mapping[RewardOwner, float],
    *,
    use: RewardUse,
    discount: float,
) -> NDArray[np.float64]:
    """Return the advantage of each token of a sample, [T]; 0 for untrained tokens.
    `turns` are all turns of its trajectory; T may end before the last of them."""
    owners = trajectory_owners(summary, turns)
    if use == "add":
        by_turn = _summed_advantages(turns, owners, advantage_of, discount)
    else:
        of_trajectory = advantage_of[owners[-1]]
        by_turn = {
            turn.id: advantage_of.get(RewardOwner("turn", turn.id), of_trajectory)
            for turn in turns
        }
    parts: list[NDArray[np.float64]] = []
    for turn in turns:
        num_tokens = len(turn.context_ids_T) + len(turn.sampled_ids_T)
        parts.append(np.full(num_tokens, by_turn[turn.id]))
    return np.where(mask_T, np.concatenate(parts)[: len(mask_T)], 0.0)


def _summed_advantages(
    turns: Sequence[Turn],
    owners: Sequence[RewardOwner],
    advantage_of: Mapping[RewardOwner, float],
    discount: float,
) -> dict[str, float]:
    """Return, by turn id, the discounted sum of the advantages of the turn, of the
    turns that follow it, and of the trajectory, whose rewards come with its last
    turn."""
    trajectory_advantage = sum(advantage_of[owner] for owner in owners)
    turn_sum = 0.0
    sums: dict[str, float] = {}
    for turn in reversed(turns):
        turn_owner = RewardOwner("turn", turn.id)
        turn_sum = advantage_of.get(turn_owner, 0.0) + discount * turn_sum
        sums[turn.id] = trajectory_advantage + turn_sum
        trajectory_advantage *= discount
    return sums
