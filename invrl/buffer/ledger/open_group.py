"""A group that has not ended: the attempts at its places, their states, and the
finished rollouts.

`group_buffer.py` owns the groups and stores them in its snapshot. Only `ledger.py`
changes states.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from invrl.types.groups import Group, GroupOutcome
from invrl.types.leases import Place
from invrl.types.rollouts import RolloutSummary
from invrl.types.weights import WeightVersion


class RolloutState(StrEnum):
    IN_FLIGHT = "in_flight"
    """Leased to a worker; no outcome yet."""
    INTERRUPTED = "interrupted"
    """Was in flight at the checkpoint that the run resumed from. It is leased again,
    unless its group ends before."""
    FINISHED = "finished"
    """Rewarded; its group is not complete."""
    GROUPED = "grouped"
    """Part of a complete group that may be taken."""
    TAKEN = "taken"
    """Part of the batch that the loop holds."""
    TRAINED = "trained"
    """The optimizer has made its steps with the batch."""
    DROPPED = "dropped"
    """Not trained, for a `DropReason`."""


@dataclass(slots=True)
class OpenGroup:
    """Holds the current attempt at each index. Earlier attempts were dropped."""

    number: int
    task_id: str
    source_id: str
    """Task id from the task source; `task_id` may have a number appended."""
    attempts_G: list[int]
    states_G: list[RolloutState | None]
    """States of the current attempts; None: not leased yet."""
    finished: dict[int, RolloutSummary] = field(default_factory=dict)
    """Finished rollouts by index."""
    leased_under: dict[int, WeightVersion] = field(default_factory=dict)
    """Buffer's version when the current attempt was last leased, by index. No token of
    it is older."""

    @property
    def id(self) -> str:
        return f"g{self.number}"

    def place(self, index: int) -> Place:
        """Return the place of the current attempt at this index."""
        return Place(self.id, index, self.attempts_G[index])

    def members(self, state: RolloutState | None) -> list[int]:
        """Return indices whose current attempt is in this state."""
        return [
            index
            for index, member_state in enumerate(self.states_G)
            if member_state is state
        ]

    def to_lease(self) -> list[int]:
        """Return indices whose current attempt must be leased, for the first time or
        again."""
        return sorted([*self.members(None), *self.members(RolloutState.INTERRUPTED)])

    def awaits(self, place: Place) -> bool:
        """Whether the rollout at this place is in flight."""
        if not 0 <= place.index < len(self.states_G):
            return False
        return (
            self.states_G[place.index] is RolloutState.IN_FLIGHT
            and self.place(place.index) == place
        )

    def rollouts(self) -> list[RolloutSummary]:
        """Return the finished rollouts in the order of their indices."""
        return [self.finished[index] for index in sorted(self.finished)]

    def versions(self) -> tuple[WeightVersion, WeightVersion] | None:
        """Return the versions of the oldest and newest token that would be trained;
        None if there is no such token."""
        trained = [
            rollout for rollout in self.finished.values() if rollout.trained_tokens
        ]
        if not trained:
            return None
        oldest = min(rollout.oldest_version for rollout in trained)
        newest = max(rollout.newest_version for rollout in trained)
        return oldest, newest

    @property
    def oldest_version(self) -> WeightVersion | None:
        """Version of the oldest token that the group has or that a running rollout may
        have; None if there is no such token."""
        running = self.members(RolloutState.IN_FLIGHT)
        oldest = [self.leased_under[index] for index in running]
        versions = self.versions()
        if versions is not None:
            oldest.append(versions[0])
        return min(oldest, default=None)

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: the oldest token, then the group's number."""
        oldest = WeightVersion(0)
        versions = self.versions()
        if versions is not None:
            oldest, _ = versions
        return oldest, self.number

    def outcome(
        self, *, version: WeightVersion, success_reward: float, dropped: str
    ) -> GroupOutcome:
        """Return how the group ended. `version` is the trainer's; `dropped` is the
        reason, "" if it is kept."""
        rewards_G = tuple(rollout.reward for rollout in self.rollouts())
        return GroupOutcome(
            task_id=self.source_id,
            group_id=self.id,
            version=version,
            rewards_G=rewards_G,
            num_solved=sum(reward >= success_reward for reward in rewards_G),
            complete=len(rewards_G) == len(self.states_G),
            dropped=dropped,
        )

    def group(self) -> Group:
        return Group(
            id=self.id, task_id=self.task_id, rollouts_G=tuple(self.rollouts())
        )
