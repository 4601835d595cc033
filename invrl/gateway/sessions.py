"""The registry of sessions: who may sample, in which session, until when. Pure and in memory.

Invariants: a key opens its own session and nothing else; keys are kept as hashes and compared in
constant time; admission happens only when a session opens, so an admitted session is never refused
mid-way. The session API opens and closes sessions here, the agent API looks keys up."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from invrl.errors import SessionError
from invrl.types import GroupMember, Outcome, Purpose, Sampling, Session, SessionLimits

SessionState = Literal["open", "unrewarded", "finished", "aborted", "expired"]
"""`unrewarded`: finished, but for its reward, which it waits for. `expired`: its time was up."""

_RETRY_AFTER_S = 1.0
_CLOSED_KEPT = 8192
"""Closed sessions that still answer with their outcome; older ones are forgotten (the store has them)."""
_MAX_FAMILY = 64
"""Sessions that may descend from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward and its named parts, for the session or for one of its turns or branches (by turn id)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    turn: str = ""
    branch: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class SessionRecord:
    """A session and what became of it."""

    session: Session
    key_hash: bytes
    opened_at: float
    reward_deadline: float | None = None
    """Unix seconds: until when a finished session waits for its reward; None: it does not."""
    parent: SessionRecord | None = field(default=None, repr=False)
    children: list[SessionRecord] = field(default_factory=list, repr=False)
    state: SessionState = "open"
    frozen: bool = False
    """Finish or abort has begun: nothing that comes now changes what the session hands over."""
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: dict[str, Reward] = field(default_factory=dict)
    branch_rewards: dict[str, Reward] = field(default_factory=dict)
    outcome: Outcome | None = None
    overridden: set[str] = field(default_factory=set)
    """Sampling parameters that a client asked for and the run did not grant."""

    def top(self) -> SessionRecord:
        """The session that this one descends from: the one whose outcome counts."""
        return self if self.parent is None else self.parent.top()

    def family(self, *, finished: bool = False) -> Iterator[SessionRecord]:
        """This session and its descendants; `finished`: without those that were aborted or expired."""
        yield self
        for child in self.children:
            if not finished or child.state == "finished":
                yield from child.family(finished=finished)


def hash_key(key: str) -> bytes:
    """Keys carry 192 random bits: a plain hash is enough."""
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is opened as one: a session for each of a group's members."""

    task_id: str
    group_id: str
    members: Sequence[GroupMember]
    purpose: Purpose
    sampling: Sampling
    limits: SessionLimits = field(default_factory=SessionLimits)
    parent: SessionRecord | None = None
    request_id: str = ""
    """Who asks again under the same id gets the same sessions."""


class SessionRegistry:
    """All sessions this gateway knows."""

    def __init__(self, *, max_open: int, ttl_s: float, public_url: str) -> None:
        self._max_open, self._ttl_s, self._public_url = max_open, ttl_s, public_url.rstrip("/")
        self._by_id: dict[str, SessionRecord] = {}
        self._by_key: dict[bytes, SessionRecord] = {}
        self._open: dict[str, SessionRecord] = {}
        self._closed: dict[str, SessionRecord] = {}
        self._requests: dict[str, tuple[Opening, list[SessionRecord]]] = {}
        self._counts: Counter[SessionState] = Counter()

    def open(self, group: Opening, now: float) -> list[SessionRecord]:
        """All members of a group, or none: SessionError 429 when they do not fit."""
        held, more = len(self._open), len(group.members)
        if held + more > self._max_open:
            full = f"{held} sessions are open; {more} more would pass {self._max_open}"
            raise SessionError(full, status=429, code="too_many_sessions", retry_after_s=_RETRY_AFTER_S)
        parent = group.parent
        if parent is not None and parent.frozen:
            reason = f"session {parent.session.id} is closed"
            raise SessionError(reason, status=409, code="session_closed")
        if parent is not None and len(list(parent.top().family())) > _MAX_FAMILY:
            raise SessionError(
                f"{_MAX_FAMILY} sessions descend from one", status=403, code="too_many_children"
            )
        records = []
        for member in group.members:
            key = "isk-" + secrets.token_urlsafe(24)
            session = Session(
                id="ses-" + secrets.token_hex(8),
                key=key,
                base_url=f"{self._public_url}/s/{key}/v1",
                task_id=group.task_id,
                group_id=group.group_id,
                index=member.index,
                attempt=member.attempt,
                purpose=group.purpose,
                sampling=group.sampling,
                limits=group.limits,
                parent_id=parent.session.id if parent else "",
            )
            record = SessionRecord(session=session, key_hash=hash_key(key), opened_at=now, parent=parent)
            self._by_id[session.id] = self._open[session.id] = self._by_key[record.key_hash] = record
            self._counts["open"] += 1
            records.append(record)
        if parent is not None:
            parent.children += records
        if group.request_id:
            self._requests[group.request_id] = group, records
        if len(self._requests) > _CLOSED_KEPT:
            del self._requests[next(iter(self._requests))]
        return records

    def reopened(self, group: Opening) -> list[SessionRecord]:
        """The sessions that an earlier try of the same request opened; none if there was none. SessionError
        409 if that was another request."""
        before, records = self._requests.get(group.request_id, (group, []))
        if before != group:
            reason = f"request_id {group.request_id!r} has opened other sessions"
            raise SessionError(reason, status=409, code="request_id_reused", param="request_id")
        return records

    def forget(self, records: Sequence[SessionRecord]) -> None:
        """Sessions whose opening came to nothing; nobody has their keys."""
        self._requests = {name: held for name, held in self._requests.items() if held[1] is not records}
        for record in records:
            del self._open[record.session.id], self._by_id[record.session.id], self._by_key[record.key_hash]
            self._counts["open"] -= 1

    def by_key(self, keys: Sequence[str]) -> SessionRecord:
        """The open session that all of `keys` name. SessionError 401: none given, unknown, closed, or
        two that differ."""
        if not keys:
            raise _unauthorized("no session key: give it in the path, as bearer or as x-api-key")
        hashes = [hash_key(key) for key in keys]
        if not all(hmac.compare_digest(hashes[0], other) for other in hashes):
            raise _unauthorized("the request carries two session keys that differ", code="conflicting_keys")
        record = self._by_key.get(hashes[0])
        if record is None or not hmac.compare_digest(record.key_hash, hashes[0]):
            raise _unauthorized("unknown session key")
        if record.state != "open":
            code = "session_timeout" if record.state == "expired" else "session_closed"
            raise _unauthorized(f"the session is {record.state}", code=code)
        return record

    def by_id(self, session_id: str) -> SessionRecord:
        record = self._by_id.get(session_id)
        if record is None:
            raise SessionError(f"no session {session_id!r}", status=404, code="session_not_found")
        return record

    def reward(self, record: SessionRecord, reward: Reward) -> None:
        """The last value wins until the session is finished; a child's until its parent is. SessionError
        409 after that."""
        top = record.top()
        late = top.frozen and top.reward_deadline is None
        if late or record.state in ("aborted", "expired"):
            code = "reward_too_late" if record.state == "expired" else "session_closed"
            state = "being closed" if record.state == "open" else record.state
            raise SessionError(f"session {record.session.id} is {state}", status=409, code=code)
        if reward.turn:
            record.turn_rewards[reward.turn] = reward
        elif reward.branch:
            record.branch_rewards[reward.branch] = reward
        else:
            record.reward, record.components = reward.value, dict(reward.components)

    def wait(self, record: SessionRecord, deadline: float) -> None:
        """A finished session without a reward waits for one."""
        self._counts[record.state] -= 1
        record.state, record.reward_deadline = "unrewarded", deadline
        self._counts["unrewarded"] += 1

    def close(self, record: SessionRecord, state: SessionState, outcome: Outcome) -> None:
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state, record.outcome, record.frozen = state, outcome, True
        self._closed[record.session.id] = self._open.pop(record.session.id)
        if len(self._closed) > _CLOSED_KEPT:
            oldest = self._closed.pop(next(iter(self._closed)))
            del self._by_id[oldest.session.id], self._by_key[oldest.key_hash]

    def expired(self, now: float) -> list[SessionRecord]:
        """Open sessions past their time to live, and unrewarded ones past their reward's deadline."""

        def end(record: SessionRecord) -> float:
            own = record.opened_at + min(self._ttl_s, record.session.limits.timeout_s)
            return own if record.reward_deadline is None else record.reward_deadline

        return [record for record in self._open.values() if now > end(record)]

    def counts(self) -> Mapping[SessionState, int]:
        """Sessions by state since the start."""
        return dict(self._counts)


def _unauthorized(message: str, code: str = "invalid_api_key") -> SessionError:
    return SessionError(message, status=401, code=code)
