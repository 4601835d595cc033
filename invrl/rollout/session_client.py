"""The gateway's session API as any outside environment uses it: open, finish, abort.

Invariants: every call ends within its deadline and says what it waited for; a gateway that is full (429),
restarting (503) or unreachable is asked again until then, with its Retry-After honoured (every call may be
repeated without harm); any other refusal is a SessionError at once. Opening takes the environment key; the
rest is done with the session's own key, so who runs a rollout needs no more than its session (a session that
comes from the store has no key: the environment key serves). Used by the
dispatcher, the evaluation and the rollout workers."""

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
from invrl.types import (
    FailedRollout,
    FailureReason,
    GroupLease,
    Outcome,
    Purpose,
    RolloutSummary,
    Sampling,
    Session,
)

T = TypeVar("T")
CONNECTION_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
"""Kept for less than uvicorn's 5 s, so that the server never closes a connection just as we write to it."""
DEADLINE_S = 60.0
"""Of a call, unless it says otherwise."""
_MAX_DETAIL = 4000
_ASK_AGAIN = frozenset({429, 502, 503, 504})
_BACKOFF_S = (0.05, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreportedRollout(FailedRollout):
    """A failed rollout whose session the gateway does not know any more: no outbox row speaks for it, so the
    buffer must be told."""


class _Opened(msgspec.Struct):
    sessions: list[Session]


class SessionClient:
    """Calls the gateway at `base_url` (no /v1). One per event loop. Opening sessions takes the `env_key`."""

    def __init__(self, base_url: str, *, env_key: str = "", deadline_s: float = DEADLINE_S) -> None:
        self._url, self._env_key, self._deadline_s = base_url.rstrip("/"), env_key, deadline_s
        self._http = httpx.AsyncClient(limits=CONNECTION_LIMITS, trust_env=False)

    async def open(
        self,
        lease: GroupLease,
        *,
        purpose: Purpose = "train",
        sampling: Sampling | None = None,
        deadline_s: float | None = None,
    ) -> list[Session]:
        """One session per member of the lease, in order, once however often an answer is lost. Waits while
        the gateway admits no more. Raises SessionError, DeadlineError."""
        body = {"task_id": lease.task.id, "group_id": lease.group_id, "members": lease.members}
        body |= {"purpose": purpose, "sampling": sampling, "request_id": secrets.token_hex(16)}
        what = f"the gateway to open {len(lease.members)} sessions of group {lease.group_id}"
        answer = await self._post("/sessions", body, self._env_key, what, deadline_s)
        sessions = _decoded(answer, _Opened, what).sessions
        if [(s.index, s.attempt) for s in sessions] != [(m.index, m.attempt) for m in lease.members]:
            raise SessionError(f"{what}: it opened others: {answer.text}", status=502, code="bad_answer")
        return sessions

    async def finish(
        self, session: Session, reward: float, components: Mapping[str, float] | None = None
    ) -> Outcome:
        """Ends a session; its rollout is committed when this returns. FailedRollout where the gateway counts
        it as one (it made no turn, or had been aborted before). Raises SessionError, DeadlineError."""
        what = f"the gateway to finish session {session.id}"
        body = {"reward": reward, "components": dict(components or {})}
        answer = await self._post(f"/sessions/{session.id}/finish", body, session.key, what)
        return _outcome(answer, what)

    async def abort(self, session: Session, reason: FailureReason, detail: str) -> Outcome:
        """Ends a session without a reward; what it generates is cancelled. How the session ended: one
        that had ended before stays as it was; an UnreportedRollout where the gateway refuses (it does not
        know the session). Raises SessionError for what is no refusal, DeadlineError."""
        what = f"the gateway to abort session {session.id}"
        # User code's text may hold lone surrogates, which no JSON carries.
        body = {"reason": reason.value, "detail": detail[-_MAX_DETAIL:].encode(errors="replace").decode()}
        try:
            answer = await self._post(
                f"/sessions/{session.id}/abort", body, session.key or self._env_key, what
            )
        except SessionError as refusal:
            if not is_refusal(refusal):
                raise
            return UnreportedRollout(
                session_id=session.id,
                task_id=session.task_id,
                group_id=session.group_id,
                index=session.index,
                attempt=session.attempt,
                reason=reason,
                detail=f"{body['detail']}\n{refusal}",
            )
        return _outcome(answer, what)

    async def close(self) -> None:
        await self._http.aclose()

    async def _post(
        self, path: str, body: Mapping[str, object], key: str, what: str, deadline_s: float | None = None
    ) -> httpx.Response:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + seconds
        content = msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        backoff, most = _BACKOFF_S
        url, seen = self._url + path, "no answer"
        while (left := end - time.monotonic()) > 0:
            pause = backoff
            try:
                answer = await self._http.post(url, content=content, headers=headers, timeout=left)
            except httpx.TransportError as error:
                seen = repr(error)
            else:
                if answer.is_success:
                    return answer
                refusal = _refusal(answer, what)
                if answer.status_code not in _ASK_AGAIN:
                    raise refusal
                seen = str(refusal)
                pause = backoff if refusal.retry_after_s is None else refusal.retry_after_s
            await asyncio.sleep(min(pause, max(0.0, end - time.monotonic())))
            backoff = min(2 * backoff, most)
        raise DeadlineError(f"{what}; last seen: {seen}", seconds)


def is_refusal(error: SessionError) -> bool:
    """The gateway works and will not do what this session asks (4xx): the end of a rollout, not of a run."""
    return 400 <= error.status < 500


def _decoded(answer: httpx.Response, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except msgspec.DecodeError as error:
        reason = f"{what}: cannot read its answer ({error}): {answer.text[:300]}"
        raise SessionError(reason, status=502, code="bad_answer") from error


def _outcome(answer: httpx.Response, what: str) -> Outcome:
    """A FailedRollout is told by its `reason`."""
    failed = "reason" in _decoded(answer, dict[str, Any], what)
    return _decoded(answer, FailedRollout if failed else RolloutSummary, what)


def _refusal(answer: httpx.Response, what: str) -> SessionError:
    """The gateway's error body, or whatever answered in its place."""
    message, code, retry_after_s = answer.text[:300], "refused", None
    with contextlib.suppress(msgspec.DecodeError, KeyError):
        error = msgspec.json.decode(answer.content, type=dict[str, dict[str, Any]])["error"]
        message = str(error.get("message", message))
        code = str(error.get("code") or error.get("type") or code)
    with contextlib.suppress(ValueError):
        retry_after_s = max(0.0, float(answer.headers.get("retry-after", "")))
    status = answer.status_code
    return SessionError(f"{what}: {status} {message}", status=status, code=code, retry_after_s=retry_after_s)
