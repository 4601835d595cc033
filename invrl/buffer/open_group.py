"""A group that has not ended: its members' current attempts, where each is in its life, and what has come
back. Owned by `buffer.py`, part of its snapshot; states change through `ledger.py` alone."""

from dataclasses import dataclass, field
from enum import StrEnum

from invrl.types import Group, RolloutSummary, WeightVersion


class RolloutState(StrEnum):
    IN_FLIGHT = "in_flight"
    """Leased to a worker; no outcome yet."""
    FINISHED = "finished"
    """Rewarded; its group is not complete."""
    GROUPED = "grouped"
    """In a complete group that may be taken."""
    TAKEN = "taken"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Place:
    """One try at one index of one group: what a rollout is to the buffer."""

    group_id: str
    index: int
    attempt: int


@dataclass(slots=True)
class OpenGroup:
    """Earlier attempts than the current ones were dropped."""

    number: int
    task_id: str
    attempts_G: list[int]
    states_G: list[RolloutState | None]
    """Of the current attempts; None: not leased yet."""
    finished: dict[int, RolloutSummary] = field(default_factory=dict)
    leased_under: dict[int, WeightVersion] = field(default_factory=dict)
    """By index: the buffer's version when the current attempt was last leased. No token of it is older."""
    passed_over: bool = False
    """Was ready when a full batch was taken without it."""

    @property
    def id(self) -> str:
        return f"g{self.number}"

    def members(self, state: RolloutState | None) -> list[int]:
        """Indices whose current attempt is in this state."""
        return [index for index, one in enumerate(self.states_G) if one is state]

    def awaits(self, index: int, attempt: int) -> bool:
        return index in self.members(RolloutState.IN_FLIGHT) and self.attempts_G[index] == attempt

    def rollouts(self) -> list[RolloutSummary]:
        return [self.finished[index] for index in sorted(self.finished)]

    def versions(self) -> tuple[WeightVersion, WeightVersion] | None:
        """Of the oldest and of the newest token that would be trained; None if there is none."""
        trained = [rollout for rollout in self.finished.values() if rollout.trained_tokens]
        if not trained:
            return None
        return min(one.oldest_version for one in trained), max(one.newest_version for one in trained)

    def group(self) -> Group:
        return Group(id=self.id, task_id=self.task_id, rollouts_G=tuple(self.rollouts()))
