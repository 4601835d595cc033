"""The registry of sessions: who may sample, in which session, until when. Pure and in
memory.

Invariants: a key opens its own session and nothing else; admission happens only when a
session opens, so an admitted session is never refused later; a key and an id begin with
the number of the worker that holds the session. The session API opens and closes
sessions here; the agent API looks keys up.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from invrl.errors import SessionError
from invrl.gateway.keys import (
    KEY_PREFIX,
    hash_key,
    signed_key,
    single_key_hash,
    unauthorized,
)
from invrl.gateway.session_record import LastHeard, SessionRecord
from invrl.host.processes.awake_time import AwakeClock
from invrl.store.rows import RewardDeadline, SessionState
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.fields import field_values
from invrl.types.leases import GroupMember
from invrl.types.rollouts import Outcome
from invrl.types.sessions import Reward, Session, SessionTerms

Name = TypeVar("Name", str, bytes)

_ID_PREFIX = "ses-"
_NAME = re.compile(rf"(?:{KEY_PREFIX}|{_ID_PREFIX})([0-9a-f]{{2}})")
_RETRY_AFTER_S = 1.0
_CLOSED_SESSIONS = 8192
"""Number of closed sessions held here with their outcome; older ones are looked up in
the store."""
_MAX_FAMILY = 64
"""Maximum size of a family: a session and all its descendants."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPlace:
    """Place of this worker among the gateway's. Default: the only one."""

    number: int = 0
    urls: Sequence[str] = ("",)
    open_sessions: memoryview = field(
        default_factory=lambda: memoryview(bytearray(8)).cast("Q")
    )
    """Number of open sessions of each worker (uint64), in shared memory."""
    starts: int = 1
    awake_time: AwakeClock = field(default_factory=AwakeClock)
    """Continues when the worker is replaced."""

    @property
    def mark(self) -> str:
        """Part of the keys and ids of this worker's sessions after their prefix."""
        return f"{self.number:02x}"

    def owner(self, name: str) -> int | None:
        """Return the worker that holds the session with this key or id; None if the
        name has no worker."""
        match = _NAME.match(name)
        if match is None:
            return None
        number = int(match[1], 16)
        if number >= len(self.urls):
            return None
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A request to open sessions: one for each of these members of a group, all of them
    or none."""

    terms: SessionTerms
    members: Sequence[GroupMember]
    parent: SessionRecord | None = None
    request_id: str = ""
    """A request that is repeated with the same id gets the same sessions."""


class SessionRegistry:
    """Sessions of one worker. `recall_closed` reads a closed session by its id or the
    hash of its key from the store. `secret`: ids and keys of requests with an id are
    derived from it, so that the store need not hold keys. `incarnation` is the run's.
    Two incarnations with one secret make different sessions for the same request id:
    those of the first are lost, and their places are leased again."""

    def __init__(
        self,
        *,
        max_open: int,
        ttl_s: float,
        public_url: str,
        secret: bytes = b"",
        incarnation: str = "",
        place: WorkerPlace | None = None,
        recall_closed: Callable[[str | bytes], SessionRecord | None] = lambda _: None,
    ) -> None:
        self._max_open = max_open
        self._ttl_s = ttl_s
        self._public_url = public_url.rstrip("/")
        self._secret = secret
        self._incarnation = incarnation
        self._recall_closed = recall_closed
        self._worker = place or WorkerPlace()
        self.awake_time = self._worker.awake_time
        """Clock of the times to live and the deadlines of sessions."""
        self._by_id: dict[str, SessionRecord] = {}
        self._by_key: dict[bytes, SessionRecord] = {}
        self._open: dict[str, SessionRecord] = {}
        """Sessions without an outcome, by id."""
        self._closed: dict[str, SessionRecord] = {}
        self._counts: Counter[SessionState] = Counter()

    def open(
        self, opening: Opening, *, now: float, opened_at: float
    ) -> list[SessionRecord]:
        """Open all sessions or none. `now` is in lived seconds, `opened_at` in Unix
        seconds. Raises SessionError 429 if there are too many open sessions, 403 if the
        family is too large, 409 if the parent is closed."""
        open_sessions = sum(self._worker.open_sessions)
        new_sessions = len(opening.members)
        if open_sessions + new_sessions > self._max_open:
            reason = f"{open_sessions} sessions are open; {new_sessions} more would pass {self._max_open}"
            raise SessionError(
                reason,
                status=429,
                code="too_many_sessions",
                retry_after_s=_RETRY_AFTER_S,
            )
        parent = opening.parent
        if parent is not None and parent.frozen:
            raise SessionError(
                f"session {parent.session.id} is closed",
                status=409,
                code="session_closed",
            )
        if parent is not None and len(list(parent.top().family())) > _MAX_FAMILY:
            reason = f"{_MAX_FAMILY} sessions descend from one"
            raise SessionError(reason, status=403, code="too_many_children")
        records: list[SessionRecord] = []
        for position in range(new_sessions):
            session = self._new_session(opening, position)
            records.append(
                SessionRecord(
                    session=session,
                    key_hash=hash_key(session.key),
                    opened_at=opened_at,
                    awake_at_opening=now,
                )
            )
        self.restore(records)
        return records

    def reopened(self, opening: Opening) -> list[SessionRecord]:
        """Return the sessions that an earlier try of the same request opened; none if
        there was no such try. Raises SessionError 409 if the earlier request with this
        id asked for other sessions."""
        if not opening.request_id:
            return []
        expected = [
            self._new_session(opening, position)
            for position in range(len(opening.members))
        ]
        records: list[SessionRecord] = []
        for session in expected:
            record = self.find(session.id)
            if record is not None:
                records.append(record)
        if not records:
            return []
        # The store has no keys: what was restored from it gets its key and its URL
        # here.
        with_keys = [
            replace(record.session, key=session.key, base_url=session.base_url)
            for record, session in zip(records, expected, strict=False)
        ]
        id_after_last, _ = self._names(opening, len(expected))
        opened_more = self.find(id_after_last) is not None
        if opened_more or with_keys != expected:
            reason = f"request_id {opening.request_id!r} has opened other sessions"
            raise SessionError(
                reason, status=409, code="request_id_reused", param="request_id"
            )
        for record, session in zip(records, with_keys, strict=True):
            record.session = session
        return records

    def restore(self, records: Iterable[SessionRecord]) -> None:
        """Add sessions that are not over, from the oldest to the newest, and their
        descendants."""
        last_heard_of_group: dict[str, LastHeard] = {}
        for record in records:
            session = record.session
            if session.parent_id:
                parent = self._by_id[session.parent_id]
                parent.children.append(record)
                record.parent = parent
                record.last_heard = parent.last_heard
            else:
                last_heard = LastHeard(self.awake_time.now)
                record.last_heard = last_heard_of_group.setdefault(
                    session.group_id, last_heard
                )
            self._by_id[session.id] = record
            self._by_key[record.key_hash] = record
            if record.outcome is None:
                self._open[session.id] = record
                self._counts[record.state] += 1
        self._publish_open_sessions()

    def forget(self, records: Sequence[SessionRecord]) -> None:
        """Remove sessions whose opening failed; nobody has their keys."""
        for record in records:
            del self._open[record.session.id]
            del self._by_id[record.session.id]
            del self._by_key[record.key_hash]
            self._counts["open"] -= 1
            if record.parent is not None:
                record.parent.children.remove(record)
        self._publish_open_sessions()

    def by_key(self, keys: Sequence[str]) -> SessionRecord:
        """Return the open session that all of `keys` name. Raises SessionError 401 if
        there is no key, if it is unknown or its session is closed, or if two keys
        differ; 410 if the run has ended."""
        key_hash = single_key_hash(keys)
        record = self._find(self._by_key, key_hash)
        if record is None or not hmac.compare_digest(record.key_hash, key_hash):
            raise unauthorized("unknown session key")
        if record.state == "open":
            return record
        if record.group_dropped():
            reason = f"the session is {record.state}: {record.group_dropped()}"
            raise unauthorized(reason, code="group_dropped")
        if record.outlived_the_run():
            raise SessionError("the run has ended", status=410, code="run_ended")
        code = "session_timeout" if record.state == "expired" else "session_closed"
        raise unauthorized(f"the session is {record.state}", code=code)

    def by_id(self, session_id: str) -> SessionRecord:
        """Return the session with this id. Raises SessionError 404 if there is none."""
        record = self.find(session_id)
        if record is None:
            raise SessionError(
                f"no session {session_id!r}", status=404, code="session_not_found"
            )
        return record

    def find(self, session_id: str) -> SessionRecord | None:
        """Return the session with this id, open or closed."""
        return self._find(self._by_id, session_id)

    def reward(self, record: SessionRecord, reward: Reward) -> None:
        """Set a reward; a later one replaces it, until the session is finished (a
        child's until its parent is). Raises SessionError 409 after that, 410 if the run
        has ended."""
        self.check_unsettled(record)
        if reward.turn:
            record.turn_rewards[reward.turn] = reward
        elif reward.branch:
            record.branch_rewards[reward.branch] = reward
        else:
            record.reward = reward.value
            record.components = dict(reward.components)

    def attach(self, record: SessionRecord, extra: ExtraNumbers) -> None:
        """Set the numbers of the rollout and of turns; later ones replace them. Numbers
        of tokens are only in the store. Raises SessionError like `reward`."""
        self.check_unsettled(record)
        record.numbers.update(extra.numbers)
        for turn_id, turn_numbers in extra.turn_numbers.items():
            record.turn_numbers.setdefault(turn_id, {}).update(turn_numbers)

    def check_unsettled(self, record: SessionRecord) -> None:
        """Raise SessionError 409 or 410 if the session no longer takes a reward or
        numbers."""
        top = record.top()
        top_is_settled = top.frozen and top.reward_deadline is None
        if top_is_settled or record.state in ("aborted", "expired"):
            raise self._reward_refusal(record)

    def _reward_refusal(self, record: SessionRecord) -> SessionError:
        """Return the reason that a closed session takes no reward."""
        state = "being closed" if record.state == "open" else record.state
        reason = f"session {record.session.id} is {state}"
        if record.group_dropped():
            reason = f"{reason}: {record.group_dropped()}"
            return SessionError(reason, status=409, code="group_dropped")
        if record.outlived_the_run():
            return SessionError("the run has ended", status=410, code="run_ended")
        code = "reward_too_late" if record.state == "expired" else "session_closed"
        return SessionError(reason, status=409, code=code)

    def wait(self, record: SessionRecord, deadline: RewardDeadline) -> None:
        """Let a finished session without a reward wait for one until `deadline`."""
        self._counts[record.state] -= 1
        self._counts["unrewarded"] += 1
        record.state = "unrewarded"
        record.reward_deadline = deadline

    def close(
        self, record: SessionRecord, state: SessionState, outcome: Outcome
    ) -> None:
        self._counts[record.state] -= 1
        self._counts[state] += 1
        record.state = state
        record.outcome = outcome
        record.frozen = True
        del self._open[record.session.id]
        if (
            record.parent is None
        ):  # a child is kept until its parent closes and needs its result
            for member in record.family():
                self._keep_closed(member)
        self._publish_open_sessions()

    def expired(self, now: float) -> list[SessionRecord]:
        """Return open sessions past their time to live, and unrewarded ones past their
        reward's deadline. `now` is in lived seconds."""
        return [
            record for record in self._open.values() if now > self._expiry_s(record)
        ]

    def open_records(self) -> list[SessionRecord]:
        """Return sessions that can be called, including children."""
        return [record for record in self._open.values() if record.state == "open"]

    def counts(self) -> Mapping[SessionState, int]:
        """Return the number of sessions in each state since the start."""
        return dict(self._counts)

    def _new_session(self, opening: Opening, position: int) -> Session:
        """Return the session for the member at this position of the request."""
        session_id, key = self._names(opening, position)
        member = opening.members[position]
        parent_id = ""
        if opening.parent is not None:
            parent_id = opening.parent.session.id
        return Session(
            **field_values(opening.terms),
            id=session_id,
            key=key,
            base_url=f"{self._public_url}/s/{key}/v1",
            index=member.index,
            attempt=member.attempt,
            parent_id=parent_id,
        )

    def _names(self, opening: Opening, position: int) -> tuple[str, str]:
        """Return id and key of a session: random, or, for a request with an id, the
        same at each of its tries within one incarnation of the run."""
        if opening.request_id:
            seed = f"opening\0{self._incarnation}\0{opening.request_id}\0{position}"
            bits = hmac.digest(self._secret, seed.encode(), "sha512")
        else:
            bits = secrets.token_bytes(32)
        mark = self._worker.mark
        session_id = f"{_ID_PREFIX}{mark}{bits[24:32].hex()}"
        random_part = base64.urlsafe_b64encode(bits[:24]).decode()
        key = signed_key(f"{KEY_PREFIX}{mark}{random_part}", self._secret)
        return session_id, key

    def _find(
        self, records: Mapping[Name, SessionRecord], name: Name
    ) -> SessionRecord | None:
        record = records.get(name)
        if record is not None:
            return record
        record = self._recall_closed(name)
        if record is not None:
            self._by_id[record.session.id] = record
            self._by_key[record.key_hash] = record
            self._keep_closed(record)
        return record

    def _keep_closed(self, record: SessionRecord) -> None:
        self._closed[record.session.id] = record
        if len(self._closed) > _CLOSED_SESSIONS:
            oldest_id = next(iter(self._closed))
            oldest = self._closed.pop(oldest_id)
            del self._by_id[oldest_id]
            del self._by_key[oldest.key_hash]

    def _expiry_s(self, record: SessionRecord) -> float:
        """Return the lived seconds at which the session expires."""
        if record.reward_deadline is not None:
            return record.reward_deadline.awake_s
        allowed_s = min(self._ttl_s, record.session.limits.timeout_s)
        return record.awake_at_opening + allowed_s + record.held_s

    @property
    def share(self) -> float:
        """This worker's share of the gateway's open sessions."""
        return len(self._open) / max(1, sum(self._worker.open_sessions))

    def _publish_open_sessions(self) -> None:
        """Publish the number of open sessions here to the other workers."""
        self._worker.open_sessions[self._worker.number] = len(self._open)
