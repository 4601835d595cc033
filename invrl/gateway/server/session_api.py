"""The HTTP API of sessions, for our own rollout workers and for environments that we do not start.

Leasing tasks and opening sessions take the environment key; children, reward, finish, abort and state take
that or the session's own. Thin: bodies in, `Lifecycle` called, its answer out."""

import asyncio
import contextlib
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from invrl.errors import SessionError
from invrl.gateway.registry import Opening, SessionRecord, hash_key, hash_of_one, unauthorized
from invrl.gateway.server import session_bodies as bodies
from invrl.gateway.server.agent_api import session_keys
from invrl.gateway.sessions.closing import auxiliary_roots
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.types import GroupMember, Outcome, Sampling, SessionLimits

_LEASE_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRoutes:
    """`/tasks/lease`, `/sessions…` and `/metrics`: each public method but `router` is a route's handler."""

    env_key: str
    """It opens; a session's own key acts on that session."""
    model: str
    """The name that clients call the model by."""
    lifecycle: Lifecycle
    metrics: Callable[[bool], Awaitable[Mapping[str, object]]]
    """True: those of all workers."""
    ending: Callable[[], bool]
    """Whether the gateway is about to end."""

    def router(self, route_class: type[APIRoute]) -> APIRouter:
        bearer = HTTPBearer(auto_error=False, description="the environment key, or a session's own")
        refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": bodies.ErrorBody}}
        api = APIRouter(responses=refusals, dependencies=[Security(bearer)], route_class=route_class)
        one = "/sessions/{session_id}"
        waits: dict[int | str, dict[str, Any]] = {202: {"model": bodies.Unrewarded}}
        api.post("/tasks/lease")(self.lease_task)
        api.post("/sessions", status_code=201)(self.open_sessions)
        api.post(one + "/children", status_code=201)(self.open_child)
        api.post(one + "/reward")(self.reward_session)
        api.post(one + "/finish", response_model=Outcome, responses=waits)(self.finish_session)
        api.post(one + "/abort")(self.abort_session)
        api.post(one + "/heartbeat")(self.hear_of_session)
        api.get(one, response_model_exclude_unset=True)(self.show_session)
        api.get("/metrics")(self.show_metrics)
        return api

    async def lease_task(self, request: Request, body: bodies.LeaseBody) -> bodies.Leased:
        """A task with the members of its group to run, for each of which a session is to be opened. Waits up
        to `wait_s` for one. `ended`: the run is over, and the environment may end too."""
        self._check_environment(request)
        leases = self.lifecycle.leases
        if leases is None:
            reason = "this run's tasks are not leased: it needs external_environments"
            raise SessionError(reason, status=409, code="no_leases")
        end = time.monotonic() + body.wait_s
        while not self.lifecycle.run_ended():
            lease = await asyncio.to_thread(leases.take, time.time())
            if lease is not None:
                lease_timeout_s = self.lifecycle.policy.lease_timeout_s
                given = bodies.Lease(
                    **msgspec.to_builtins(lease), model=self.model, lease_timeout_s=lease_timeout_s
                )
                return bodies.Leased(lease=given, ended=False)
            if time.monotonic() >= end or self.ending() or await request.is_disconnected():
                break
            await asyncio.sleep(_LEASE_POLL_S)
        return bodies.Leased(lease=None, ended=self.lifecycle.run_ended())

    async def open_sessions(self, request: Request, body: bodies.OpenBody) -> bodies.Opened:
        """A session for each member, all of them or none. The same request again, with the same `request_id`,
        gets the same sessions."""
        self._check_environment(request)
        group = Opening(
            task_id=body.task_id,
            group_id=body.group_id,
            members=[GroupMember(index=member.index, attempt=member.attempt) for member in body.members],
            purpose=body.purpose,
            sampling=_chosen(body.sampling, self.lifecycle.sampling),
            limits=_within(self.lifecycle.limits, body.limits),
            request_id=body.request_id,
        )
        records = await self.lifecycle.open(group)
        return self._opened(records)

    async def open_child(self, request: Request, session_id: str, body: bodies.ChildBody) -> bodies.Opened:
        """A session for a sub-agent, with a key and a base URL of its own: a list of one. `parent_id` is the
        session's that was asked for it; limits are the parent's, or lower ones."""
        parent = self._session(request, session_id)
        limits = _within(parent.session.limits, body.limits)
        child = await self.lifecycle.open_child(parent, limits, body.request_id)
        return self._opened([child])

    async def reward_session(
        self, request: Request, session_id: str, body: bodies.RewardBody
    ) -> bodies.Rewarded:
        record = self._session(request, session_id)
        if body.turn and body.branch:
            reason = "a reward is of a turn or of a branch, not of both"
            raise SessionError(reason, status=400, code="invalid_request", param="branch")
        await self.lifecycle.reward(record, body.value())
        return bodies.Rewarded(session_id=session_id, reward=body.reward, state=record.state)

    async def finish_session(
        self, request: Request, session_id: str, body: bodies.FinishBody
    ) -> Outcome | Response:
        record = self._session(request, session_id)
        outcome = await self.lifecycle.finish(record, body.value())
        if outcome is not None:
            return outcome
        assert record.reward_deadline is not None
        waits = bodies.Unrewarded(session_id=session_id, deadline=record.reward_deadline)
        return JSONResponse(waits.model_dump(), 202)

    async def abort_session(self, request: Request, session_id: str, body: bodies.AbortBody) -> Outcome:
        record = self._session(request, session_id)
        return await self.lifecycle.abort(record, body.reason, body.detail)

    async def hear_of_session(self, request: Request, session_id: str) -> bodies.Heartbeat:
        """For an environment that computes for long between two other calls: it is there."""
        record = self._session(request, session_id)
        idle_timeout_s = self.lifecycle.policy.session_idle_timeout_s
        return bodies.Heartbeat(
            session_id=session_id, state=record.state, session_idle_timeout_s=idle_timeout_s
        )

    async def show_session(self, request: Request, session_id: str) -> bodies.SessionView:
        record = self._session(request, session_id)
        conversation = self.lifecycle.turns.find(record)
        turns = conversation.turns if conversation else []
        delivered = conversation.delivered if conversation else set()
        parts = (record.session, record)
        names = bodies.SessionView.model_fields
        shown = {name: getattr(part, name) for part in parts for name in names if hasattr(part, name)}
        shown |= {
            "model": self.model,
            "children": [child.session.id for child in record.children],
            "overridden": sorted(record.overridden),
            "turns": await self.lifecycle.turns.overview(record),
            "forks": Counter(turn.fork_reason for turn in turns if turn.fork_reason),
            "auxiliary_roots": auxiliary_roots(turns, delivered),
        }
        return bodies.SessionView(**shown)

    async def show_metrics(self, request: Request) -> dict[str, Any]:
        self._check_environment(request)
        return dict(await self.metrics(request.query_params.get("worker") != "own"))

    def _opened(self, records: Sequence[SessionRecord]) -> bodies.Opened:
        opened = [bodies.OpenedSession.of(record.session, self.model) for record in records]
        return bodies.Opened(sessions=opened)

    def authorize(self, request: Request) -> None:
        """Before the body is read. SessionError 401 unless the request carries a key for its route; 404 where
        the environment names a session that is not there."""
        session_id = request.path_params.get("session_id")
        if session_id is None:
            self._check_environment(request)
        else:
            self._session(request, session_id).life.see()

    def _check_environment(self, request: Request) -> None:
        """SessionError 401 unless the request carries the environment key."""
        if not self._is_environment(hash_of_one(session_keys(None, request.headers))):
            raise unauthorized("this needs the environment key")

    def _session(self, request: Request, session_id: str) -> SessionRecord:
        """The session, open or closed. SessionError 401: one answer for a foreign key and for a session
        that is not there, so that keys cannot probe ids; 404 for the environment."""
        given, registry = hash_of_one(session_keys(None, request.headers)), self.lifecycle.registry
        if self._is_environment(given):
            return registry.by_id(session_id)
        with contextlib.suppress(SessionError):
            record = registry.by_id(session_id)
            if hmac.compare_digest(given, record.key_hash):
                return record
        raise unauthorized("this needs the environment key or the session's own")

    def _is_environment(self, key_hash: bytes) -> bool:
        return hmac.compare_digest(key_hash, hash_key(self.env_key))


def _chosen(asked: bodies.SamplingBody | None, usual: Sampling) -> Sampling:
    if asked is None:
        return usual
    limit = usual.max_new_tokens if asked.max_new_tokens is None else asked.max_new_tokens
    return Sampling(temperature=asked.temperature, top_p=asked.top_p, max_new_tokens=limit)


def _within(most: SessionLimits, asked: bodies.LimitsBody) -> SessionLimits:
    """What is asked for, and the most where nothing is. SessionError 400 for more than that."""
    granted = {name: value for name, value in asked if value is not None}
    for name, value in granted.items():
        if value > getattr(most, name):
            reason = f"limits.{name}: at most {getattr(most, name)} is granted"
            raise SessionError(reason, status=400, code="limit_too_high", param=f"limits.{name}")
    return replace(most, **granted)
