"""The registry of sessions: who may sample, in which session, until when. Pure and in memory.

Invariants: a key opens its own session and nothing else; keys are kept as hashes and compared in constant
time; admission happens only when a session opens, so an admitted session is never refused mid-way; a key and
an id begin with the number of the worker that holds the session, and a key ends with a code by which every
worker sees that this gateway made it. The session API opens and closes sessions here, the agent API looks
keys up."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from invrl.errors import SessionError
from invrl.types import (
    FailedRollout,
    FailureReason,
    GroupMember,
    Outcome,
    Purpose,
    Reward,
    Sampling,
    Session,
    SessionLimits,
)

SessionState = Literal["open", "unrewarded", "finished", "aborted", "expired"]
"""`unrewarded`: finished, but for its reward, which it waits for. `expired`: its time was up."""

Name = TypeVar("Name", str, bytes)

_NAME = re.compile(r"(?:isk|ses)-([0-9a-f]{2})")
_KEY_CODE_BYTES = 12
_RETRY_AFTER_S = 1.0
_CLOSED_KEPT = 8192
"""Closed sessions that still answer with their outcome; older ones are forgotten (the store has them)."""
_MAX_FAMILY = 64
"""Sessions that may descend from one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPlace:
    """Which worker this is. As it stands: the only one."""

    number: int = 0
    urls: Sequence[str] = ("",)
    """Each worker's own address."""
    open_sessions: memoryview = field(default_factory=lambda: memoryview(bytearray(8)).cast("Q"))
    """How many each worker holds (uint64), in memory that all of them share."""
    starts: int = 1

    @property
    def mark(self) -> str:
        """What names of this worker's sessions begin with, after `isk-` or `ses-`."""
        return f"{self.number:02x}"

    def owner(self, name: str) -> int | None:
        """The worker that a session's key or id names."""
        found = _NAME.match(name)
        number = int(found[1], 16) if found else len(self.urls)
        return number if number < len(self.urls) else None


@dataclass(slots=True, eq=False)
class LifeSign:
    """When the environment that holds some sessions was last heard of. The sessions that were opened together
    share one, and so do their children: an environment may run them one after the other."""

    seen_at: float = field(default_factory=time.time)
    """Unix seconds."""

    def see(self) -> None:
        """A call begins, goes on, or ends."""
        self.seen_at = time.time()


@dataclass(slots=True, kw_only=True, eq=False)
class SessionRecord:
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
    forced: Counter[str] = field(default_factory=Counter)
    """Its requests whose reply's form was to be forced, by the field that asked for it."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Its requests, by the fields of theirs that nothing reads."""
    life: LifeSign = field(default_factory=LifeSign)
    counts: Counter[str] = field(default_factory=Counter)
    """How its requests went on from what was recorded: match levels, thinking kept, prompt ids of forks."""

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


def hash_of_one(keys: Sequence[str]) -> bytes:
    """Of the one key that a request carries. SessionError 401 if it carries none, or two that differ."""
    hashes = [hash_key(key) for key in keys]
    if not hashes:
        raise unauthorized("no key: give it as bearer or as x-api-key, a session's own also in the path")
    if not all(hmac.compare_digest(hashes[0], other) for other in hashes):
        raise unauthorized("the request carries two keys that differ", code="conflicting_keys")
    return hashes[0]


def signed_key(name: str, secret: bytes) -> str:
    """The session key that begins with `name`, which holds the random bits. What is added is a code that
    takes `secret` to make."""
    code = hmac.digest(secret, b"session key\0" + name.encode(), "sha256")[:_KEY_CODE_BYTES]
    return name + base64.urlsafe_b64encode(code).decode()


def is_signed(key: str, secret: bytes) -> bool:
    """Whether `key` was made with `secret`. Says nothing about its session, which may be closed."""
    name = key[: -4 * _KEY_CODE_BYTES // 3]
    return hmac.compare_digest(signed_key(name, secret).encode(), key.encode())


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
    """The sessions of one worker. `recall`: a closed one by its id or its key's hash, from the store.
    `secret`: what ids and keys of requests with an id are made from, so that the store need not hold keys.
    `incarnation`: of the run. Two incarnations under one secret make different sessions for the same request
    id: the first one's are lost, and its places are leased again."""

    def __init__(
        self,
        *,
        max_open: int,
        ttl_s: float,
        public_url: str,
        secret: bytes = b"",
        incarnation: str = "",
        place: WorkerPlace | None = None,
        recall: Callable[[str | bytes], SessionRecord | None] = lambda _: None,
    ) -> None:
        self._max_open, self._ttl_s, self._public_url = max_open, ttl_s, public_url.rstrip("/")
        self._secret, self._incarnation = secret, incarnation
        self._recall, self._worker = recall, place or WorkerPlace()
        self._by_id: dict[str, SessionRecord] = {}
        self._by_key: dict[bytes, SessionRecord] = {}
        self._open: dict[str, SessionRecord] = {}
        self._closed: dict[str, SessionRecord] = {}
        self._counts: Counter[SessionState] = Counter()

    def open(self, group: Opening, now: float) -> list[SessionRecord]:
        """All members of a group, or none: SessionError 429 if they do not fit, 409 under a closed parent."""
        held, more = sum(self._worker.open_sessions), len(group.members)
        if held + more > self._max_open:
            full = f"{held} sessions are open; {more} more would pass {self._max_open}"
            raise SessionError(full, status=429, code="too_many_sessions", retry_after_s=_RETRY_AFTER_S)
        parent = group.parent
        if parent is not None and parent.frozen:
            raise SessionError(f"session {parent.session.id} is closed", status=409, code="session_closed")
        if parent is not None and len(list(parent.top().family())) > _MAX_FAMILY:
            reason = f"{_MAX_FAMILY} sessions descend from one"
            raise SessionError(reason, status=403, code="too_many_children")
        sessions = [self._session(group, at) for at in range(more)]
        records = [SessionRecord(session=s, key_hash=hash_key(s.key), opened_at=now) for s in sessions]
        self.restore(records)
        return records

    def reopened(self, group: Opening) -> list[SessionRecord]:
        """The sessions that an earlier try of the same request opened; none if there was none. SessionError
        409 if that was another request."""
        if not group.request_id:
            return []
        asked = [self._session(group, at) for at in range(len(group.members))]
        found = [record for one in asked if (record := self._find(self._by_id, one.id))]
        pairs = zip(found, asked, strict=False)
        keyed = [replace(old.session, key=new.key, base_url=new.base_url) for old, new in pairs]
        more = self._find(self._by_id, self._names(group, len(asked))[0])
        if found and (more or keyed != asked):
            reason = f"request_id {group.request_id!r} has opened other sessions"
            raise SessionError(reason, status=409, code="request_id_reused", param="request_id")
        for record, session in zip(found, keyed, strict=True):
            record.session = session  # with its key, which the store does not have
        return found

    def restore(self, records: Iterable[SessionRecord]) -> None:
        """Sessions that are not over, from the oldest to the newest, each with all that descend from it."""
        life_of_group: dict[str, LifeSign] = {}
        for record in records:
            session = record.session
            if session.parent_id:
                record.parent = self._by_id[session.parent_id]
                record.parent.children.append(record)
                record.life = record.parent.life
            else:
                record.life = life_of_group.setdefault(session.group_id, record.life)
            self._by_id[session.id] = self._by_key[record.key_hash] = record
            if record.outcome is None:
                self._open[session.id] = record
                self._counts[record.state] += 1
        self._worker.open_sessions[self._worker.number] = len(self._open)

    def forget(self, records: Sequence[SessionRecord]) -> None:
        """Sessions whose opening came to nothing; nobody has their keys."""
        for record in records:
            del self._open[record.session.id], self._by_id[record.session.id], self._by_key[record.key_hash]
            self._counts["open"] -= 1
            if record.parent is not None:
                record.parent.children.remove(record)
        self._worker.open_sessions[self._worker.number] = len(self._open)

    def by_key(self, keys: Sequence[str]) -> SessionRecord:
        """The open session that all of `keys` name. SessionError 401: none given, unknown, closed, or
        two that differ."""
        key_hash = hash_of_one(keys)
        record = self._find(self._by_key, key_hash)
        if record is None or not hmac.compare_digest(record.key_hash, key_hash):
            raise unauthorized("unknown session key")
        if record.state != "open":
            code = "session_timeout" if record.state == "expired" else "session_closed"
            dropped = _why_dropped(record)
            if dropped:
                raise unauthorized(f"the session is {record.state}: {dropped}", code="group_dropped")
            if _outlived_the_run(record):
                raise SessionError("the run has ended", status=410, code="run_ended")
            raise unauthorized(f"the session is {record.state}", code=code)
        return record

    def by_id(self, session_id: str) -> SessionRecord:
        record = self._find(self._by_id, session_id)
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
            dropped = _why_dropped(record)
            if dropped:
                reason = f"session {record.session.id} is {state}: {dropped}"
                raise SessionError(reason, status=409, code="group_dropped")
            if _outlived_the_run(record):
                raise SessionError("the run has ended", status=410, code="run_ended")
            raise SessionError(f"session {record.session.id} is {state}", status=409, code=code)
        if reward.turn:
            record.turn_rewards[reward.turn] = reward
        elif reward.branch:
            record.branch_rewards[reward.branch] = reward
        else:
            record.reward, record.components = reward.value, dict(reward.components)

    def wait(self, record: SessionRecord, deadline: float) -> None:
        """A finished session without a reward waits for one."""
        self._counts.update({record.state: -1, "unrewarded": 1})
        record.state, record.reward_deadline = "unrewarded", deadline

    def close(self, record: SessionRecord, state: SessionState, outcome: Outcome) -> None:
        self._counts.update({record.state: -1, state: 1})
        record.state, record.outcome, record.frozen = state, outcome, True
        del self._open[record.session.id]
        if record.parent is None:  # until then it is asked for what its children were
            for one in record.family():
                self._keep_closed(one)
        self._worker.open_sessions[self._worker.number] = len(self._open)

    def _session(self, group: Opening, at: int) -> Session:
        (session_id, key), member = self._names(group, at), group.members[at]
        return Session(
            id=session_id,
            key=key,
            base_url=f"{self._public_url}/s/{key}/v1",
            task_id=group.task_id,
            group_id=group.group_id,
            index=member.index,
            attempt=member.attempt,
            purpose=group.purpose,
            sampling=group.sampling,
            limits=group.limits,
            parent_id=group.parent.session.id if group.parent else "",
        )

    def _names(self, group: Opening, at: int) -> tuple[str, str]:
        """Id and key of the session of member `at`: random, or the same for each try of one request in one
        incarnation of the run."""
        bits = secrets.token_bytes(32)
        if group.request_id:
            place = f"opening\0{self._incarnation}\0{group.request_id}\0{at}".encode()
            bits = hmac.digest(self._secret, place, "sha512")
        mark = self._worker.mark
        random_part = base64.urlsafe_b64encode(bits[:24]).decode()
        return f"ses-{mark}{bits[24:32].hex()}", signed_key(f"isk-{mark}{random_part}", self._secret)

    def _find(self, held: Mapping[Name, SessionRecord], name: Name) -> SessionRecord | None:
        record = held.get(name)
        if record is None and (record := self._recall(name)) is not None:
            self._by_id[record.session.id] = self._by_key[record.key_hash] = record
            self._keep_closed(record)
        return record

    def _keep_closed(self, record: SessionRecord) -> None:
        self._closed[record.session.id] = record
        if len(self._closed) > _CLOSED_KEPT:
            oldest = self._closed.pop(next(iter(self._closed)))
            del self._by_id[oldest.session.id], self._by_key[oldest.key_hash]

    def expired(self, now: float) -> list[SessionRecord]:
        """Open sessions past their time to live, and unrewarded ones past their reward's deadline."""

        def end(record: SessionRecord) -> float:
            own = record.opened_at + min(self._ttl_s, record.session.limits.timeout_s)
            return own if record.reward_deadline is None else record.reward_deadline

        return [record for record in self._open.values() if now > end(record)]

    def open_records(self) -> list[SessionRecord]:
        """Sessions that can still be called, children among them."""
        return [record for record in self._open.values() if record.state == "open"]

    def counts(self) -> Mapping[SessionState, int]:
        """Sessions by state since the start."""
        return dict(self._counts)


def _why_dropped(record: SessionRecord) -> str:
    """What a session was told that was cancelled because its group was dropped; "" for any other."""
    outcome = record.outcome
    if isinstance(outcome, FailedRollout) and outcome.reason is FailureReason.GROUP_DROPPED:
        return outcome.detail
    return ""


def _outlived_the_run(record: SessionRecord) -> bool:
    outcome = record.outcome
    return isinstance(outcome, FailedRollout) and outcome.reason is FailureReason.RUN_ENDED


def unauthorized(message: str, code: str = "invalid_api_key") -> SessionError:
    return SessionError(message, status=401, code=code)
