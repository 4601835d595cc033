"""The record of a live session: everything the gateway knows about it apart from its
turns."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from invrl.errors import SessionError
from invrl.store.rows import StoredSession
from invrl.types.fields import field_values
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout

_KEPT_REFUSALS = 3
_REFUSAL_CHARACTERS = 300


@dataclass(slots=True, eq=False)
class LastHeard:
    """Time at which the environment of a session was last heard from. Sessions that
    were opened together share one object, and so do their children: an environment may
    run them one after the other."""

    clock: Callable[[], float] = time.monotonic
    """Lived seconds of the worker, for a session that is open there."""
    at: float = field(init=False)

    def __post_init__(self) -> None:
        self.update()

    def update(self) -> None:
        """Update the time. Call it when a call begins, continues, or ends."""
        self.at = self.clock()


@dataclass(slots=True, kw_only=True, eq=False)
class SessionRecord(StoredSession):
    """The store's data of a session, and what only its worker holds in memory."""

    parent: SessionRecord | None = field(default=None, repr=False)
    children: list[SessionRecord] = field(default_factory=list, repr=False)
    frozen: bool = False
    """Whether finish or abort has begun: the session's outcome no longer changes."""
    overridden: set[str] = field(default_factory=set)
    """Client requests that the run did not grant: sampling parameters, another
    model."""
    forced: Counter[str] = field(default_factory=Counter)
    """Requests that wanted the form of the reply forced, by the field that asked for
    it."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Requests by fields that the gateway does not know."""
    refusals: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_REFUSALS))
    """Last refused requests: status, code and message of each, without repeats."""
    last_heard: LastHeard = field(default_factory=LastHeard)
    held_s: float = 0.0
    """Seconds for which the gate held turns of it or its children. Neither its time to
    live nor the deadline of its rollout counts them."""
    counts: Counter[str] = field(default_factory=Counter)
    """Counts of how requests continued the recording: match levels, tokens of kept
    thinking and of forked prompts."""

    @classmethod
    def restored(cls, stored: StoredSession) -> SessionRecord:
        """Return the record of a session that an earlier worker opened."""
        return cls(**field_values(stored), frozen=stored.state != "open")

    def note_refusal(self, error: SessionError) -> None:
        """Keep the message to the client, which an agent may swallow. Refusals after
        the session's end are not kept: the end itself says it."""
        if self.frozen:
            return
        message = " ".join(error.message.split())[:_REFUSAL_CHARACTERS]
        text = f"{error.status} {error.code}: {message}"
        if text in self.refusals:
            self.refusals.remove(text)
        self.refusals.append(text)

    def top(self) -> SessionRecord:
        """Return the session at the root of the family. Its outcome is the one that
        counts."""
        record = self
        while record.parent is not None:
            record = record.parent
        return record

    def ancestry(self) -> Iterator[SessionRecord]:
        """Yield this session, its parent, and so on up to the root of the family."""
        record: SessionRecord | None = self
        while record is not None:
            yield record
            record = record.parent

    def family(self, *, finished: bool = False) -> Iterator[SessionRecord]:
        """Yield this session and its descendants. `finished`: without those that were
        aborted or expired, and without their descendants."""
        yield self
        for child in self.children:
            if not finished or child.state == "finished":
                yield from child.family(finished=finished)

    def group_dropped(self) -> str:
        """Return the message for a session that was cancelled because its group was
        dropped; "" for any other."""
        if (
            isinstance(self.outcome, FailedRollout)
            and self.outcome.reason is FailureReason.GROUP_DROPPED
        ):
            return self.outcome.detail
        return ""

    def outlived_the_run(self) -> bool:
        """Whether the session was ended because the run had ended."""
        return (
            isinstance(self.outcome, FailedRollout)
            and self.outcome.reason is FailureReason.RUN_ENDED
        )
