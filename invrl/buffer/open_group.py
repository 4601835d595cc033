"""A group that is not taken: its members' current attempts and what has come back. Owned by `buffer.py`, part
of its snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field

from invrl.buffer.ledger import Place, RolloutState
from invrl.types import Group, RolloutSummary


@dataclass(slots=True)
class OpenGroup:
    """A member that is not `finished` is in flight, or `to_lease`."""

    number: int
    task_id: str
    attempts_G: list[int]
    to_lease: list[int]
    """Indices whose current attempt nobody has leased."""
    finished: dict[int, RolloutSummary] = field(default_factory=dict)
    passed_over: bool = False
    """Was ready when a full batch was taken without it."""

    @property
    def id(self) -> str:
        return f"g{self.number}"

    def rollouts(self) -> list[RolloutSummary]:
        return [self.finished[index] for index in sorted(self.finished)]

    def complete(self) -> bool:
        return len(self.finished) == len(self.attempts_G)

    def group(self) -> Group:
        return Group(id=self.id, task_id=self.task_id, rollouts_G=tuple(self.rollouts()))

    def places(self) -> list[Place]:
        """Every try so far, those that nobody has leased yet among them."""
        lasts = enumerate(self.attempts_G)
        return [Place(self.id, index, attempt) for index, last in lasts for attempt in range(last + 1)]

    def states(self, of_finished: RolloutState) -> dict[Place, RolloutState]:
        """Of every leased try: earlier ones were dropped, one that is not finished is in flight."""
        states: dict[Place, RolloutState] = {}
        for place in self.places():
            if place.attempt < self.attempts_G[place.index]:
                states[place] = RolloutState.DROPPED
            elif place.index in self.finished:
                states[place] = of_finished
            elif place.index not in self.to_lease:
                states[place] = RolloutState.IN_FLIGHT
        return states
