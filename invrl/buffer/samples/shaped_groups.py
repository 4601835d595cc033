"""Groups of a batch as their rewards are compared: final rewards shaped, rollouts left
out. Pure.

The zero-variance filter reads the unshaped rewards of all rollouts, like DAPO's dynamic
sampling.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from invrl.algorithms.advantages.advantage_rules import AdvantageRules
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedGroup:
    """A group that may have lost some or all members."""

    compared: Group
    """Rollouts whose rewards count, with their shaped rewards."""
    shaping: Mapping[str, float]
    """Session id -> amount added to the final reward."""
    untrained: frozenset[str]
    """Session ids of compared rollouts without a trained token."""

    def trained(self) -> Iterator[RolloutSummary]:
        for member in self.compared.rollouts_G:
            if member.session_id not in self.untrained:
                yield member


def shape_group(group: Group, rules: AdvantageRules) -> ShapedGroup:
    """Apply the rules to a group. Lengths are compared among the rollouts that are not
    left out."""
    members: list[RolloutSummary] = []
    untrained: set[str] = set()
    for member in group.rollouts_G:
        use = rules.rollout_use(
            failed=member.failure is not None, truncated=member.truncated
        )
        if use == "leave_out":
            continue
        if use == "baseline":
            untrained.add(member.session_id)
        members.append(member)
    shaping: dict[str, float] = {}
    if rules.shaping.acts and members:
        rewards_G = np.array([member.reward for member in members], np.float64)
        lengths_G = np.array([member.sampled_tokens for member in members])
        terms = rules.shaping.terms(rewards_G, lengths_G).tolist()
        shaping = {
            member.session_id: term for member, term in zip(members, terms, strict=True)
        }
        members = [
            replace(member, reward=member.reward + shaping[member.session_id])
            for member in members
        ]
    compared = replace(group, rollouts_G=tuple(members))
    return ShapedGroup(
        compared=compared, shaping=shaping, untrained=frozenset(untrained)
    )
