"""The gateway's session API for any external environment: open, reward, attach numbers,
finish, abort.

Invariants: every call ends within its deadline, and its error says what it waited for.
A request to a gateway that is full (429), restarting (503) or unreachable is repeated
until the deadline, after the gateway's Retry-After if it sends one; every call may be
repeated without harm. Any other refusal raises SessionError immediately. Opening
sessions takes the environment key. The other calls take the session's own key, so
running a rollout requires only its session; a session read from the store has no key,
and the environment key is used for it.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from invrl.errors import DeadlineError, SessionError
from invrl.types.extra_columns import ExtraNumbers
from invrl.types.fields import field_values
from invrl.types.leases import GroupLease
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome, RolloutSummary
from invrl.types.sessions import Purpose, Reward, Sampling, Session

T = TypeVar("T")
CONNECTION_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
"""Idle connections are kept for less than uvicorn's 5 s, so that the server never
closes one while we write to it."""
DEADLINE_S = 60.0
_MAX_DETAIL = 4000
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_WAITS_FOR_SPACE = "disk_full"
"""Code of a refusal because the run's disk is full. This may last for hours, and the
console says so: such a reply restarts the deadline."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreportedRollout(FailedRollout):
    """A failed rollout whose session the gateway no longer knows. The outbox has no row
    for it, so it must be recorded in the buffer directly."""


class _OpenReply(msgspec.Struct):
    sessions: list[Session]


class _Heartbeat(msgspec.Struct):
    held_s: float


class SessionClient:
    """Calls the gateway at `base_url` (without /v1). A client belongs to one event
    loop. Opening sessions takes the environment key `env_key`."""

    def __init__(
        self,
        base_url: str,
        *,
        env_key: str = "",
        deadline_s: float = DEADLINE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` supplies the connections; None: separate ones."""
        self._url = base_url.rstrip("/")
        self._env_key = env_key
        self._deadline_s = deadline_s
        self._http = httpx.AsyncClient(
            limits=CONNECTION_LIMITS, trust_env=False, transport=transport
        )

    async def open(
        self,
        lease: GroupLease,
        *,
        purpose: Purpose = "train",
        sampling: Sampling | None = None,
        deadline_s: float | None = None,
    ) -> list[Session]:
        """Open one session per member of the lease and return them in order. They are
        opened once, however often a reply is lost and the request repeated. Waits while
        the gateway admits no sessions. Raises SessionError, DeadlineError."""
        body = {
            "task_id": lease.task.id,
            "group_id": lease.group_id,
            "members": lease.members,
            "purpose": purpose,
            "sampling": sampling,
            "request_id": secrets.token_hex(16),
        }
        what = f"the gateway to open {len(lease.members)} sessions of group {lease.group_id}"
        response = await self._post("/sessions", body, self._env_key, what, deadline_s)
        sessions = _decoded(response, _OpenReply, what).sessions
        opened = [(session.index, session.attempt) for session in sessions]
        requested = [(member.index, member.attempt) for member in lease.members]
        if opened != requested:
            message = f"{what}: it opened others: {response.text}"
            raise SessionError(message, status=502, code="bad_answer")
        return sessions

    async def attach(self, session: Session, extra: ExtraNumbers) -> None:
        """Attach numbers of extra columns to a session. Numbers of tokens go turn by
        turn, so that no request is too large. Raises SessionError, DeadlineError."""
        what = f"the gateway to take numbers of session {session.id}"
        requests: list[dict[str, object]] = []
        if extra.numbers or extra.turn_numbers:
            requests.append(
                {"numbers": extra.numbers, "turn_numbers": extra.turn_numbers}
            )
        for turn_id, token_numbers in extra.token_numbers.items():
            requests.append({"token_numbers": {turn_id: token_numbers}})
        for body in requests:
            await self._post(f"/sessions/{session.id}/numbers", body, session.key, what)

    async def reward(self, session: Session, reward: Reward) -> None:
        """Reward a session, or one of its turns or trajectories. Raises SessionError,
        DeadlineError."""
        what = f"the gateway to take a reward of session {session.id}"
        body = {
            "reward": reward.value,
            "components": reward.components,
            "turn": reward.turn,
            "branch": reward.branch,
        }
        await self._post(f"/sessions/{session.id}/reward", body, session.key, what)

    async def open_child(self, session: Session) -> Session:
        """Open a session for a sub-agent of this session, once, however often the
        request is repeated. Raises SessionError, DeadlineError."""
        what = f"the gateway to open a child of session {session.id}"
        body = {"request_id": secrets.token_hex(16)}
        response = await self._post(
            f"/sessions/{session.id}/children", body, session.key, what
        )
        [child] = _decoded(response, _OpenReply, what).sessions
        return child

    async def held_s(self, session: Session, *, deadline_s: float) -> float:
        """Return the seconds for which the gate has held turns of this session or its
        children. Raises SessionError, DeadlineError."""
        what = f"the gateway to say how long the gate has held session {session.id}"
        path = f"/sessions/{session.id}/heartbeat"
        response = await self._post(path, {}, session.key, what, deadline_s)
        return _decoded(response, _Heartbeat, what).held_s

    async def finish(
        self,
        session: Session,
        reward: float,
        components: Mapping[str, float] | None = None,
    ) -> Outcome:
        """End a session with its reward. When this returns, the rollout is committed.
        Returns a FailedRollout if the gateway counts it as one (it had no turn, or was
        aborted before). Raises SessionError, DeadlineError."""
        what = f"the gateway to finish session {session.id}"
        body = {"reward": reward, "components": dict(components or {})}
        response = await self._post(
            f"/sessions/{session.id}/finish", body, session.key, what
        )
        return _outcome(response, what)

    async def abort(
        self, session: Session, reason: FailureReason, detail: str
    ) -> Outcome:
        """End a session without a reward and cancel its generation. Returns how the
        session ended: the first outcome if it had ended before, an UnreportedRollout if
        the gateway does not know the session. Raises SessionError for an error that is
        no refusal, DeadlineError."""
        what = f"the gateway to abort session {session.id}"
        # Text of user code may hold lone surrogates, which JSON cannot carry.
        sent_detail = detail[-_MAX_DETAIL:].encode(errors="replace").decode()
        body = {"reason": reason.value, "detail": sent_detail}
        key = session.key or self._env_key
        try:
            response = await self._post(
                f"/sessions/{session.id}/abort", body, key, what
            )
        except SessionError as error:
            if not is_refusal(error):
                raise
            return UnreportedRollout(
                **field_values(session.identity),
                reason=reason,
                detail=f"{sent_detail}\n{error}",
            )
        return _outcome(response, what)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(
        self,
        path: str,
        body: Mapping[str, object],
        key: str,
        what: str,
        deadline_s: float | None = None,
    ) -> httpx.Response:
        """Post until the gateway accepts. `what` completes "waited for" in the error
        messages. Raises SessionError for a reply that is not worth another try,
        DeadlineError."""
        if deadline_s is None:
            deadline_s = self._deadline_s
        deadline = time.monotonic() + deadline_s
        url = self._url + path
        content = msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        backoff_s = _FIRST_BACKOFF_S
        last_seen = "no answer"
        while (time_left := deadline - time.monotonic()) > 0:
            pause_s = backoff_s
            try:
                response = await self._http.post(
                    url, content=content, headers=headers, timeout=time_left
                )
            except httpx.TransportError as error:
                last_seen = repr(error)
            else:
                if response.is_success:
                    return response
                refusal = _refusal(response, what)
                if response.status_code not in _RETRIED_STATUSES:
                    raise refusal
                last_seen = str(refusal)
                if refusal.retry_after_s is not None:
                    pause_s = refusal.retry_after_s
                if refusal.code == _WAITS_FOR_SPACE:
                    deadline = time.monotonic() + deadline_s
            time_left = max(0.0, deadline - time.monotonic())
            await asyncio.sleep(min(pause_s, time_left))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        raise DeadlineError(f"{what}; last seen: {last_seen}", deadline_s)


def is_refusal(error: SessionError) -> bool:
    """Whether the gateway works but refuses a request of this session (4xx). That ends
    a rollout, not the run."""
    return 400 <= error.status < 500


def _decoded(response: httpx.Response, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        reason = f"{what}: cannot read its answer ({error}): {response.text[:300]}"
        raise SessionError(reason, status=502, code="bad_answer") from error


def _outcome(response: httpx.Response, what: str) -> Outcome:
    """Return the outcome of a session from the gateway's reply. Only a FailedRollout
    has a `reason`."""
    if "reason" in _decoded(response, dict[str, Any], what):
        return _decoded(response, FailedRollout, what)
    return _decoded(response, RolloutSummary, what)


def _refusal(response: httpx.Response, what: str) -> SessionError:
    """Return the error of a reply: from the gateway's error body, or from the text of
    whatever replied in its place, such as a proxy."""
    message = response.text[:300]
    code = "refused"
    retry_after_s = None
    with contextlib.suppress(msgspec.DecodeError, KeyError):
        error = msgspec.json.decode(response.content, type=dict[str, dict[str, Any]])[
            "error"
        ]
        message = str(error.get("message", message))
        code = str(error.get("code") or error.get("type") or code)
    with contextlib.suppress(ValueError):
        retry_after_s = max(0.0, float(response.headers.get("retry-after", "")))
    status = response.status_code
    return SessionError(
        f"{what}: {status} {message}",
        status=status,
        code=code,
        retry_after_s=retry_after_s,
    )
