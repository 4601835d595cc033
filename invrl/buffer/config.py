"""Settings of the buffer: how stale, how many, which groups count."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator

from invrl.buffer.failures import FailureLimits
from invrl.section import COMMA_SEPARATED, Section
from invrl.types import MAX_REWARD, FailureReason

RewardBaseline = Literal["depth", "group"]
RewardUse = Literal["replace", "add"]
FilteredOut = Literal["end", "train"]


FailureRule = float | Literal["retry", "drop"]
"""What becomes of a failed rollout: it counts with this reward, its place is tried again, or its group is
dropped at once."""


class BufferConfig(Section):
    """0 is the synchronous loop, 1 is one-step-off-policy, k is fully asynchronous: one number."""

    max_staleness: NonNegativeInt = Field(0, description="versions a trained token may lag the trainer's")
    over_sampling_groups: NonNegativeInt = Field(0, description="groups in place of those filtered out")
    group_filter: str = Field("nonzero_variance", description="this filter, 'none', or module:name")
    max_filtered_batches: NonNegativeInt = Field(
        16,
        description="batches' worth of groups in a row that the group filter may drop (as it does once a "
        "task is solved) before --filtered-out; 0: any number",
    )
    filtered_out: FilteredOut = Field(
        "end",
        description="what then: end: the run ends, its model saved; train: groups are taken as they come, "
        "until the filter keeps one again",
    )
    turn_reward_baseline: RewardBaseline = Field(
        "depth",
        description="a turn's or branch's own reward is compared with the group's at the same depth, or all",
    )
    turn_reward_use: RewardUse = Field(
        "replace",
        description="own rewards of turns, branches, children stand in the final one's place, or are added",
    )
    batch_timeout_s: PositiveFloat = Field(7200.0, description="deadline for a whole batch to come together")
    failure_reward: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        ("timeout=0", "context=0", "limit=0"),
        description="REASON=REWARD: such failures count with it; =drop: they drop their group; "
        "=retry, as all others: tried again",
    )
    max_identical_failures: NonNegativeInt = Field(
        128,
        description="failures in a row, all alike and none finished between, that end the run; 0: no end; "
        "deaths of workers, engines and environments do not count",
    )

    max_failures_at_start: NonNegativeInt = Field(
        32,
        description="failures that end the run while no rollout has finished, all for the same reason; those "
        "that count with a reward, and deaths of processes, are not counted; 0: no end",
    )

    @field_validator("failure_reward")
    @classmethod
    def _check_failure_reward(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        parse_failure_rules(entries)
        return entries

    def failure_limits(self) -> FailureLimits:
        return FailureLimits(identical=self.max_identical_failures, at_start=self.max_failures_at_start)

    def failure_rules(self) -> Mapping[FailureReason, FailureRule]:
        """The rule of each reason that is named. All other failures are tried again."""
        return parse_failure_rules(self.failure_reward)


def parse_failure_rules(entries: tuple[str, ...]) -> dict[FailureReason, FailureRule]:
    """The rules in entries REASON=REWARD, REASON=drop or REASON=retry. Raises ValueError for a wrong one."""
    rules: dict[FailureReason, FailureRule] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or name not in set(FailureReason):
            reasons = ", ".join(FailureReason)
            raise ValueError(f"{entry!r} is not REASON=REWARD with a reason of: {reasons}")
        reason = FailureReason(name)
        if reason in rules:
            raise ValueError(f"the reason {name} is given twice")
        rules[reason] = _parse_rule(entry, value)
    return rules


def _parse_rule(entry: str, value: str) -> FailureRule:
    if value == "retry" or value == "drop":
        return value
    try:
        reward = float(value)
    except ValueError:
        reward = math.nan
    if not abs(reward) <= MAX_REWARD:
        raise ValueError(f"{entry!r}: not a number within ±{MAX_REWARD:g}, drop or retry")
    return reward
