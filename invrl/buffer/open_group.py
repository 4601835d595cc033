"""A group that is not taken: its members' current attempts and what has come back. Owned by `buffer.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from invrl.buffer.ledger import Place, RolloutState
from invrl.buffer.snapshot import GroupSnapshot
from invrl.errors import BufferStateError
from invrl.types import Group, RolloutSummary, Task


@dataclass(slots=True)
class OpenGroup:
    number: int
    task: Task
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
        return Group(id=self.id, task_id=self.task.id, rollouts_G=tuple(self.rollouts()))

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

    def snapshot(self) -> GroupSnapshot:
        return GroupSnapshot(
            number=self.number,
            task_id=self.task.id,
            attempts_G=tuple(self.attempts_G),
            to_lease=tuple(self.to_lease),
            finished=tuple(self.rollouts()),
            passed_over=self.passed_over,
        )

    @classmethod
    def reopen(cls, saved: GroupSnapshot, task: Task) -> OpenGroup:
        """Raises BufferStateError if the group had another task."""
        if task.id != saved.task_id:
            raise BufferStateError(
                f"group g{saved.number} had task {saved.task_id}, the task source now gives {task.id}: "
                "a run resumes only on the tasks that it began with"
            )
        return cls(
            number=saved.number,
            task=task,
            attempts_G=list(saved.attempts_G),
            to_lease=list(saved.to_lease),
            finished={rollout.index: rollout for rollout in saved.finished},
            passed_over=saved.passed_over,
        )
