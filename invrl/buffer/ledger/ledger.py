"""The ledger: the state of every rollout, and the only function that changes it.

A rollout's place is (group, index, attempt). `Ledger.move` is the only way to change
its state: it checks the transition and emits a `LedgerEntry`. Invariant: a place only
moves forward, except that an interrupted one may be in flight again after a restart,
and it ends once, either trained or dropped with a reason. `ledger_store.py` stores
every entry.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

from invrl.buffer.ledger.open_group import OpenGroup, RolloutState
from invrl.errors import BufferStateError
from invrl.types.leases import Place
from invrl.types.reasons import DropReason, FailureReason

_NEXT: dict[RolloutState | None, frozenset[RolloutState]] = {
    None: frozenset({RolloutState.IN_FLIGHT}),
    RolloutState.IN_FLIGHT: frozenset(
        {RolloutState.FINISHED, RolloutState.INTERRUPTED, RolloutState.DROPPED}
    ),
    RolloutState.INTERRUPTED: frozenset({RolloutState.IN_FLIGHT, RolloutState.DROPPED}),
    RolloutState.FINISHED: frozenset({RolloutState.GROUPED, RolloutState.DROPPED}),
    RolloutState.GROUPED: frozenset({RolloutState.TAKEN, RolloutState.DROPPED}),
    RolloutState.TAKEN: frozenset({RolloutState.TRAINED, RolloutState.DROPPED}),
    RolloutState.TRAINED: frozenset(),
    RolloutState.DROPPED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    sequence: int
    place: Place
    task_id: str
    state: RolloutState
    reason: DropReason | None = None
    """Set exactly when the state is DROPPED."""
    failure: FailureReason | None = None
    """Reason that the rollout itself failed, if that caused the drop."""
    detail: str = ""
    """The filter's reason, or the failure's detail."""
    batch_id: int | None = None
    """Set exactly when the state is TAKEN or TRAINED."""
    session_id: str = ""
    """Session whose outcome caused the transition; "" if there was none."""


class EntryFacts(TypedDict, total=False):
    """Optional fields of a transition's `LedgerEntry`."""

    reason: DropReason
    failure: FailureReason
    detail: str
    batch_id: int
    session_id: str


class Ledger:
    """Moves rollouts from state to state and counts them. Their groups hold the
    states."""

    def __init__(
        self, emit: Callable[[LedgerEntry], None] = lambda entry: None
    ) -> None:
        self._emit = emit
        self.sequence = 0
        """Number of the next entry."""
        self.counts: Counter[RolloutState] = Counter()

    def move(
        self,
        group: OpenGroup,
        index: int,
        state: RolloutState,
        **facts: Unpack[EntryFacts],
    ) -> None:
        """Change the state of one rollout. Raises BufferStateError for a transition
        that is not allowed, or whose facts do not fit the state."""
        before = group.states_G[index]
        place = group.place(index)
        entry = LedgerEntry(
            sequence=self.sequence,
            place=place,
            task_id=group.task_id,
            state=state,
            **facts,
        )
        if state not in _NEXT[before]:
            raise BufferStateError(
                f"rollout {place} cannot go from {before} to {state}"
            )
        has_reason = entry.reason is not None
        if has_reason != (state is RolloutState.DROPPED):
            raise BufferStateError(
                f"rollout {place}: state {state} with drop reason {entry.reason}"
            )
        has_batch = entry.batch_id is not None
        if has_batch != (state in (RolloutState.TAKEN, RolloutState.TRAINED)):
            raise BufferStateError(
                f"rollout {place}: state {state} with batch {entry.batch_id}"
            )
        if before is not None:
            self.counts[before] -= 1
        group.states_G[index] = state
        self.counts[state] += 1
        self.sequence += 1
        self._emit(entry)
