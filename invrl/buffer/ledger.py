"""The ledger: where every rollout is in its life, and the one door through which it moves.

A rollout's place is (group, index, attempt); `Ledger.move` is the only way to change its state, checks the
transition and emits a `LedgerEntry`. Invariant: a place moves forward only and ends once, trained or
dropped with a reason. Holds the places of groups that have not ended; `ledger_store.py` keeps every entry.
Owned by `buffer.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict, Unpack

from invrl.errors import BufferStateError
from invrl.types import DropReason, FailureReason


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


_NEXT: dict[RolloutState | None, frozenset[RolloutState]] = {
    None: frozenset({RolloutState.IN_FLIGHT}),
    RolloutState.IN_FLIGHT: frozenset({RolloutState.FINISHED, RolloutState.DROPPED}),
    RolloutState.FINISHED: frozenset({RolloutState.GROUPED, RolloutState.DROPPED}),
    RolloutState.GROUPED: frozenset({RolloutState.TAKEN, RolloutState.DROPPED}),
    RolloutState.TAKEN: frozenset({RolloutState.TRAINED, RolloutState.DROPPED}),
    RolloutState.TRAINED: frozenset(),
    RolloutState.DROPPED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Place:
    """One try at one index of one group: what a rollout is to the buffer."""

    group_id: str
    index: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One transition."""

    sequence: int
    place: Place
    task_id: str
    state: RolloutState
    reason: DropReason | None = None
    """Set exactly when the state is DROPPED."""
    failure: FailureReason | None = None
    """Why the rollout itself failed, where that is what dropped it."""
    detail: str = ""
    """The filter's own word, or the failure's detail."""
    batch_id: int | None = None
    """Set exactly when the state is TAKEN or TRAINED."""
    session_id: str = ""
    """The session that brought the outcome, where one did."""


class EntryFacts(TypedDict, total=False):
    """What may be told with a transition: these fields of its `LedgerEntry`."""

    reason: DropReason
    failure: FailureReason
    detail: str
    batch_id: int
    session_id: str


class Ledger:
    """The state of every place of the groups under way, and counts over all that ever were."""

    def __init__(self, emit: Callable[[LedgerEntry], None] | None = None) -> None:
        self._emit = emit
        self.sequence = 0
        """Of the next entry."""
        self._states: dict[Place, RolloutState] = {}
        self.counts: Counter[RolloutState] = Counter()
        """Rollouts that are in each state now, of those that ever were."""

    def state(self, place: Place) -> RolloutState | None:
        """None: never leased, or forgotten."""
        return self._states.get(place)

    def restore(
        self, states: Mapping[Place, RolloutState], counts: Mapping[RolloutState, int], sequence: int
    ) -> None:
        """As of a snapshot."""
        self._states, self.counts, self.sequence = dict(states), Counter(counts), sequence

    def forget(self, places: Iterable[Place]) -> None:
        """Places of a group that has ended: nothing can happen to them any more."""
        for place in places:
            self._states.pop(place, None)

    def unlease(self, place: Place) -> None:
        """The life of the run that leased this place is over, and brought no outcome: it is leased anew."""
        if self._states.pop(place) is not RolloutState.IN_FLIGHT:
            raise BufferStateError(f"rollout {place} is not in flight")
        self.counts[RolloutState.IN_FLIGHT] -= 1

    def move(
        self, place: Place, task_id: str, state: RolloutState, **facts: Unpack[EntryFacts]
    ) -> LedgerEntry:
        """Raises BufferStateError for a transition that does not exist."""
        entry = LedgerEntry(sequence=self.sequence, place=place, task_id=task_id, state=state, **facts)
        before = self._states.get(place)
        if state not in _NEXT[before]:
            raise BufferStateError(f"rollout {place} cannot go from {before} to {state}")
        if (entry.reason is not None) != (state is RolloutState.DROPPED):
            raise BufferStateError(f"rollout {place}: state {state} with drop reason {entry.reason}")
        if (entry.batch_id is not None) != (state in (RolloutState.TAKEN, RolloutState.TRAINED)):
            raise BufferStateError(f"rollout {place}: state {state} with batch {entry.batch_id}")
        if before is not None:
            self.counts[before] -= 1
        self._states[place] = state
        self.counts[state] += 1
        self.sequence += 1
        if self._emit is not None:
            self._emit(entry)
        return entry
