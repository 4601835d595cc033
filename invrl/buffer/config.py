"""Settings of the buffer: staleness, failures, and which groups are trained."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from invrl.buffer.failures import FailureLimits
from invrl.buffer.reward_history import RECENT_GROUPS
from invrl.types.reasons import FailureReason
from invrl.types.section import COMMA_SEPARATED, Choice, Section, with_choices
from invrl.types.sessions import MAX_REWARD

MEDIUM_DIFFICULTY = "medium_difficulty"
RewardBaseline = Literal["depth", "group"]
RewardUse = Literal["replace", "add"]
FilteredOut = Literal["end", "train"]
WhenStale = Literal["train", "mask", "wait", "drop"]
"""Treatment of tokens more than `max_staleness` versions older than the trainer's
weights: they are trained; lose their loss mask; never come to be, because a batch waits
for the rollouts that would become too old; or their whole group is dropped."""
Admission = Literal["groups", "ready"]

FailureRule = float | Literal["retry", "drop"]
"""Treatment of a failed rollout: a number is the reward it counts with, "retry" leases
its place again, "drop" drops its group immediately."""


class DifficultyConfig(Section):
    """Bounds of the group filter medium_difficulty, which this table chooses."""

    low: float = Field(
        0.2,
        ge=0.0,
        le=1.0,
        description="groups of tasks solved more rarely than this are dropped",
    )
    high: float = Field(
        0.8,
        ge=0.0,
        le=1.0,
        description="groups of tasks solved more often than this are dropped",
    )
    groups: PositiveInt = Field(
        4,
        le=RECENT_GROUPS,
        description="last groups of a task over which its success rate is taken; 1: only the group that is "
        "judged",
    )


class TurnRewardsConfig(Section):
    """Rewards of turns, trajectories and child sessions of their own."""

    baseline: RewardBaseline = Field(
        "depth",
        description="a turn's or trajectory's own reward is compared with the group's rewards at the same depth "
        "(depth), or with all of them (group)",
    )
    use: RewardUse = Field(
        "replace",
        description="own rewards of turns, trajectories and child sessions replace the final reward, or are "
        "added to it",
    )


def parse_failure_rules(entries: tuple[str, ...]) -> dict[FailureReason, FailureRule]:
    """Parse entries REASON=REWARD, REASON=drop or REASON=retry. Raises ValueError for
    any other entry."""
    rules: dict[FailureReason, FailureRule] = {}
    for entry in entries:
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or name not in set(FailureReason):
            reasons = ", ".join(FailureReason)
            raise ValueError(
                f"{entry!r} is not REASON=REWARD; REASON is one of: {reasons}"
            )
        reason = FailureReason(name)
        if reason in rules:
            raise ValueError(f"the reason {name} is given twice: name each reason once")
        rules[reason] = _parse_rule(entry, value)
    return rules


def _parse_rule(entry: str, value: str) -> FailureRule:
    if value == "retry" or value == "drop":
        return value
    try:
        reward = float(value)
    except ValueError:
        reward = math.nan
    is_valid = abs(reward) <= MAX_REWARD  # False for NaN
    if not is_valid:
        raise ValueError(
            f"{entry!r}: not a number within ±{MAX_REWARD:g}, drop or retry"
        )
    return reward


class FailuresConfig(Section):
    """Value of failed rollouts, and the number of them that ends a run."""

    reward: Annotated[tuple[str, ...], COMMA_SEPARATED] = Field(
        ("timeout=0", "context=0", "limit=0"),
        description="REASON=REWARD: failures for this reason count with the reward; REASON=drop: they drop "
        "their group; REASON=retry: the rollout is tried again, as for every reason not named",
    )
    max_identical: PositiveInt | None = Field(
        128,
        description="identical failures in a row, with no rollout finished in between, that end the run; "
        "deaths of workers, engines and environments do not count",
    )
    max_at_start: PositiveInt | None = Field(
        32,
        description="failures, all for the same reason, that end the run while no rollout has finished; "
        "failures that count with a reward and deaths of processes are not counted",
    )

    @field_validator("reward")
    @classmethod
    def _check_reward(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        parse_failure_rules(entries)
        return entries

    def limits(self) -> FailureLimits:
        return FailureLimits(
            identical=self.max_identical or 0,
            at_start=self.max_at_start or 0,
        )

    def rules(self) -> Mapping[FailureReason, FailureRule]:
        """Return the rule of each named reason. All other failures are retried."""
        return parse_failure_rules(self.reward)


class BufferConfig(Section):
    """Staleness of trained tokens, and the groups that are trained on.

    One number, `max_staleness`, decides how asynchronous the loop is: 0 is the
    synchronous loop, 1 is one-step-off-policy, k is fully asynchronous. It bounds the
    work under way; `when_stale` says what becomes of a token that is older all the
    same."""

    chosen_by: ClassVar[Mapping[str, Choice]] = {
        "difficulty": Choice("group_filter", (MEDIUM_DIFFICULTY,))
    }
    max_staleness: NonNegativeInt = Field(
        0,
        description="batches sampled ahead of the trainer, and so the age of most trained tokens, in versions",
    )
    when_stale: WhenStale = Field(
        "train",
        description="what becomes of a token that is older than --max-staleness: train: it is trained, and "
        "the off-policy correction weighs it; mask: it is not; wait: a batch waits for the rollouts that would "
        "become too old; drop: its group is dropped, which favours short rollouts",
    )
    admission: Admission = Field(
        "groups",
        description="what --max-staleness bounds: groups: batches of groups under way; ready: batches of "
        "groups that are complete and wait for the trainer, while --rollout-concurrency is always used up",
    )
    over_sampling_groups: NonNegativeInt = Field(
        0,
        description="groups that are sampled in addition, in place of those that are filtered out; what a "
        "batch does not need comes next",
    )
    group_filter: str = Field(
        "nonzero_variance",
        description="nonzero_variance, medium_difficulty, 'none', or your own filter as module:name",
    )
    difficulty: DifficultyConfig | None = None
    turn_rewards: TurnRewardsConfig = TurnRewardsConfig.model_validate({})
    failures: FailuresConfig = FailuresConfig.model_validate({})
    success_reward: float = Field(
        1.0,
        ge=-MAX_REWARD,
        le=MAX_REWARD,
        description="reward from which a rollout counts as solved, for success rates: of the filter "
        "medium_difficulty, of a task's history, and of what a task source or curriculum is told",
    )
    max_filtered_batches: PositiveInt | None = Field(
        16,
        description="batches' worth of groups in a row that the group filter may drop (as it does once a "
        "task is solved) before --filtered-out applies",
    )
    filtered_out: FilteredOut = Field(
        "end",
        description="what happens after --max-filtered-batches: end: the run saves its model and ends; "
        "train: unfiltered groups are trained on until the filter keeps one again",
    )
    batch_timeout_s: PositiveFloat = Field(
        7200.0, description="deadline for a batch to be complete"
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_filter(cls, values: Any) -> Any:
        """Put the filter next to its bounds, and the bounds next to the filter."""
        return with_choices(cls, values, values) if isinstance(values, dict) else values
