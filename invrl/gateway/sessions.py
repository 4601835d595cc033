"""The registry of sessions: who may sample, in which session, until when. Pure and in memory.

Invariants: a key opens its own session and nothing else; keys are kept as hashes and compared in
constant time; admission happens only when a session opens, so an admitted session is never refused
mid-way. The session API opens and closes sessions here, the agent API looks keys up."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from invrl.errors import SessionError
from invrl.types import GroupMember, Outcome, Purpose, Sampling, Session

SessionState = Literal["open", "finished", "aborted", "expired"]

_RETRY_AFTER_S = 1.0
_CLOSED_KEPT = 8192
"""Closed sessions that still answer with their outcome; older ones are forgotten (the store has them)."""


@dataclass(slots=True, kw_only=True)
class SessionRecord:
    """A session and what became of it."""

    session: Session
    key_hash: bytes
    opened_at: float
    state: SessionState = "open"
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None
    overridden: set[str] = field(default_factory=set)
    """Sampling parameters that a client asked for and the run did not grant."""
    counts: Counter[str] = field(default_factory=Counter)
    """How its requests went on from what was recorded: match levels, thinking kept, prompt ids of forks."""


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


class SessionRegistry:
    """All sessions this gateway knows."""

    def __init__(self, *, max_open: int, ttl_s: float, public_url: str) -> None:
        self._max_open, self._ttl_s, self._public_url = max_open, ttl_s, public_url.rstrip("/")
        self._by_id: dict[str, SessionRecord] = {}
        self._by_key: dict[bytes, SessionRecord] = {}
        self._open: dict[str, SessionRecord] = {}
        self._closed: dict[str, SessionRecord] = {}
        self._counts: Counter[SessionState] = Counter()

    def open(self, group: Opening, now: float) -> list[SessionRecord]:
        """All members of a group, or none: SessionError 429 when they do not fit."""
        held, more = len(self._open), len(group.members)
        if held + more > self._max_open:
            full = f"{held} sessions are open; {more} more would pass {self._max_open}"
            raise SessionError(full, status=429, code="too_many_sessions", retry_after_s=_RETRY_AFTER_S)
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
            )
            record = SessionRecord(session=session, key_hash=hash_key(key), opened_at=now)
            self._by_id[session.id] = self._open[session.id] = self._by_key[record.key_hash] = record
            self._counts["open"] += 1
            records.append(record)
        return records

    def by_key(self, keys: Sequence[str]) -> SessionRecord:
        """The open session that all of `keys` name. SessionError 401: none given, unknown, closed, or
        two that differ."""
        if not keys:
            raise _unauthorized("no session key: give it in the path, as bearer or as x-api-key")
        hashes = [hash_key(key) for key in keys]
        if not all(hmac.compare_digest(hashes[0], other) for other in hashes):
            raise _unauthorized("the key in the path and the key in the headers differ")
        record = self._by_key.get(hashes[0])
        if record is None or not hmac.compare_digest(record.key_hash, hashes[0]):
            raise _unauthorized("unknown session key")
        if record.state != "open":
            raise _unauthorized(f"the session is {record.state}", code="session_closed")
        return record

    def by_id(self, session_id: str) -> SessionRecord:
        record = self._by_id.get(session_id)
        if record is None:
            raise SessionError(f"no session {session_id!r}", status=404, code="session_not_found")
        return record

    def reward(self, record: SessionRecord, reward: float, components: Mapping[str, float]) -> None:
        """The last value wins until the session closes; SessionError 409 after that."""
        if record.state != "open":
            reason = f"session {record.session.id} is {record.state}"
            raise SessionError(reason, status=409, code="session_closed")
        record.reward, record.components = reward, dict(components)

    def close(self, record: SessionRecord, state: SessionState, outcome: Outcome) -> None:
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state, record.outcome = state, outcome
        self._closed[record.session.id] = self._open.pop(record.session.id)
        if len(self._closed) > _CLOSED_KEPT:
            oldest = self._closed.pop(next(iter(self._closed)))
            del self._by_id[oldest.session.id], self._by_key[oldest.key_hash]

    def expired(self, now: float) -> list[SessionRecord]:
        """Open sessions past their time to live. Sessions open in the order of time."""
        return list(takewhile(lambda record: now - record.opened_at > self._ttl_s, self._open.values()))

    def counts(self) -> Mapping[SessionState, int]:
        """Sessions by state since the start."""
        return dict(self._counts)


def _unauthorized(message: str, code: str = "invalid_api_key") -> SessionError:
    return SessionError(message, status=401, code=code)
