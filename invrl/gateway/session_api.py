"""The HTTP API of sessions, for our own rollout workers and for environments that we do not start.

Opening takes the environment key; reward, finish, abort and state take that or the session's own.
Thin: bodies in, `Lifecycle` called, its answer out."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from invrl.errors import SessionError
from invrl.gateway.agent_api import session_keys
from invrl.gateway.lifecycle import Lifecycle
from invrl.gateway.sessions import Opening, SessionRecord, SessionRegistry, hash_key
from invrl.gateway.turns import Turns
from invrl.section import Section
from invrl.types import FailedRollout, FailureReason, GroupMember, Outcome, Purpose, Sampling

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Name = Annotated[str, Field(max_length=512)]
_SHOWN = ("id", "task_id", "group_id", "index", "attempt", "purpose", "sampling")
"""Of a session, to who asks for its state: not its key."""
_Place = Annotated[int, Field(strict=True, ge=0)]


class MemberBody(Section):
    index: _Place
    attempt: _Place = 0


class SamplingBody(Section):
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(512, ge=1)


class OpenBody(Section):
    task_id: _Name
    group_id: _Name
    members: list[MemberBody] = Field(min_length=1, max_length=4096)
    purpose: Purpose = "train"
    sampling: SamplingBody | None = None
    request_id: _Name = ""
    """Makes opening safe to try again: the same id, the same sessions."""


class RewardBody(Section):
    reward: _Number
    components: dict[str, _Number] = Field(default_factory=dict)


class FinishBody(Section):
    reward: _Number | None = None
    components: dict[str, _Number] = Field(default_factory=dict)


class AbortBody(Section):
    reason: FailureReason = FailureReason.ABORTED
    detail: str = Field("", max_length=20_000)


class KeyRing:
    """Who may do what: the environment key opens, a session's key acts on its own session."""

    def __init__(self, env_key: str, registry: SessionRegistry) -> None:
        self._env_hash, self._registry = hash_key(env_key), registry

    def check_environment(self, request: Request) -> None:
        """SessionError 401 unless the bearer is the environment key."""
        if not hmac.compare_digest(_bearer_hash(request), self._env_hash):
            raise SessionError("this needs the environment key", status=401, code="invalid_api_key")

    def session(self, request: Request, session_id: str) -> SessionRecord:
        """The session, open or closed. SessionError 401: one answer for a foreign key and for a session
        that is not there, so that keys cannot probe ids; 404 for the environment."""
        given = _bearer_hash(request)
        if hmac.compare_digest(given, self._env_hash):
            return self._registry.by_id(session_id)
        with contextlib.suppress(SessionError):
            record = self._registry.by_id(session_id)
            if hmac.compare_digest(given, record.key_hash):
                return record
        reason = "this needs the environment key or the session's own"
        raise SessionError(reason, status=401, code="invalid_api_key")


def session_routes(
    *,
    keys: KeyRing,
    lifecycle: Lifecycle,
    turns: Turns,
    metrics: Callable[[bool], Awaitable[Mapping[str, object]]],
) -> APIRouter:
    """`/sessions…` and `/metrics` (`metrics(True)`: those of all workers)."""
    api = APIRouter()

    @api.post("/sessions", status_code=201)
    async def open_sessions(request: Request, body: OpenBody) -> Response:
        keys.check_environment(request)
        group = Opening(
            task_id=body.task_id,
            group_id=body.group_id,
            members=[GroupMember(index=member.index, attempt=member.attempt) for member in body.members],
            purpose=body.purpose,
            sampling=Sampling(**body.sampling.model_dump()) if body.sampling else lifecycle.sampling,
            request_id=body.request_id,
        )
        records = await lifecycle.open(group)
        return _json({"sessions": [record.session for record in records]}, status=201)

    @api.post("/sessions/{session_id}/reward")
    async def reward_session(request: Request, session_id: str, body: RewardBody) -> Response:
        record = keys.session(request, session_id)
        await lifecycle.reward(record, body.reward, body.components)
        return _json({"session_id": session_id, "reward": body.reward})

    @api.post("/sessions/{session_id}/finish")
    async def finish_session(request: Request, session_id: str, body: FinishBody) -> Response:
        record = keys.session(request, session_id)
        if body.reward is not None and record.state == "open":
            await lifecycle.reward(record, body.reward, body.components)
        return _outcome(await lifecycle.finish(record))

    @api.post("/sessions/{session_id}/abort")
    async def abort_session(request: Request, session_id: str, body: AbortBody) -> Response:
        record = keys.session(request, session_id)
        return _outcome(await lifecycle.abort(record, body.reason, body.detail))

    @api.get("/sessions/{session_id}")
    async def show_session(request: Request, session_id: str) -> Response:
        record = keys.session(request, session_id)
        shown = {name: getattr(record.session, name) for name in _SHOWN}
        shown |= {name: getattr(record, name) for name in ("state", "reward", "components", "outcome")}
        return _json(shown | {"overridden": sorted(record.overridden), "turns": turns.overview(record)})

    @api.get("/metrics")
    async def show_metrics(request: Request) -> Response:
        keys.check_environment(request)
        return _json(await metrics(request.query_params.get("worker") != "own"))

    return api


def _outcome(outcome: Outcome) -> Response:
    """A FailedRollout is told by its `reason`."""
    state = "failed" if isinstance(outcome, FailedRollout) else "finished"
    return _json({"outcome": state, **msgspec.to_builtins(outcome)})


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _bearer_hash(request: Request) -> bytes:
    keys = session_keys(None, request.headers)
    return hash_key(keys[0] if keys else "")
