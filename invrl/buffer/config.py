"""Settings of the buffer: how stale, how many, which groups count."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from invrl.section import Section

RewardBaseline = Literal["depth", "group"]
RewardUse = Literal["replace", "add"]


class BufferConfig(Section):
    """0 is the synchronous loop, 1 is one-step-off-policy, k is fully asynchronous: one number."""

    max_staleness: NonNegativeInt = Field(0, description="versions a trained token may lag the trainer's")
    over_sampling_groups: NonNegativeInt = Field(0, description="groups in place of those filtered out")
    group_filter: str = Field("nonzero_variance", description="this filter, 'none', or module:name")
    turn_reward_baseline: RewardBaseline = Field(
        "depth",
        description="a turn's or branch's own reward is compared with the group's at the same depth, or all",
    )
    turn_reward_use: RewardUse = Field(
        "replace",
        description="own rewards of turns, branches, children stand in the final one's place, or are added",
    )
    batch_timeout_s: PositiveFloat = Field(7200.0, description="deadline for a whole batch to come together")
