"""The HTTP API of sessions, for our own rollout workers and for environments that the
run did not start.

Leasing tasks and opening sessions take the environment key; children, reward, finish,
abort and state take that key or the session's own. The handlers only translate: body
in, a call of `Lifecycle`, its result out."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response, Security
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from invrl.errors import SessionError
from invrl.gateway.keys import hash_key, request_keys, single_key_hash, unauthorized
from invrl.gateway.registry import Opening
from invrl.gateway.server.routes import session_bodies as bodies
from invrl.gateway.server.workers.metrics import GatewayMetrics
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.conversation_roots import auxiliary_roots
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.gateway.turns.turn_overview import overview
from invrl.types.leases import GroupMember
from invrl.types.rollouts import Outcome
from invrl.types.sessions import Sampling, SessionLimits, SessionTerms
from invrl.types.tasks import Json
from invrl.types.turns import Turn

_LEASE_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionRoutes:
    """`/tasks/lease`, `/sessions…`, `/metrics` and `/openapi.json`. Each public method
    except the two routers and `authorize` is the handler of a route."""

    env_key: str
    """Environment key, which opens sessions and acts on every session; a session's own
    key acts on that one."""
    model: str
    """Name under which clients call the model."""
    lifecycle: Lifecycle
    metrics: GatewayMetrics
    ending: Callable[[], bool]
    """Whether the gateway is shutting down."""

    def router(self, route_class: type[APIRoute]) -> APIRouter:
        """Return all routes except that of `numbers_router`."""
        unrewarded: dict[int | str, dict[str, Any]] = {
            202: {"model": bodies.Unrewarded}
        }
        api = _router(route_class)
        session_path = "/sessions/{session_id}"
        api.post("/tasks/lease")(self.lease_task)
        api.post("/sessions", status_code=201)(self.open_sessions)
        api.post(session_path + "/children", status_code=201)(self.open_child)
        api.post(session_path + "/reward")(self.reward_session)
        api.post(
            session_path + "/finish", response_model=Outcome, responses=unrewarded
        )(self.finish_session)
        api.post(session_path + "/abort")(self.abort_session)
        api.post(session_path + "/heartbeat")(self.keep_session_alive)
        api.get(session_path, response_model_exclude_unset=True)(self.show_session)
        api.get("/metrics")(self.show_metrics)
        api.get("/openapi.json", include_in_schema=False)(self.show_schema)
        return api

    def numbers_router(self, route_class: type[APIRoute]) -> APIRouter:
        """Return the route whose bodies hold a number for each token, and may be larger
        than others."""
        api = _router(route_class)
        api.post("/sessions/{session_id}/numbers")(self.attach_numbers)
        return api

    async def lease_task(
        self, request: Request, body: bodies.LeaseBody
    ) -> bodies.Leased:
        """Lease a task and the members of its group to run, each in a session that the
        environment opens. Waits up to `wait_s` for a task. `ended`: the run is over,
        and the environment may end too."""
        self._check_environment(request)
        leases = self.lifecycle.leases
        if leases is None:
            reason = "this run's tasks are not leased: it needs external_environments"
            raise SessionError(reason, status=409, code="no_leases")
        deadline = time.monotonic() + body.wait_s
        while not self.lifecycle.run_ended():
            group_lease = await asyncio.to_thread(leases.take, time.time())
            if group_lease is not None:
                lease = bodies.Lease(
                    **msgspec.to_builtins(group_lease),
                    model=self.model,
                    lease_timeout_s=self.lifecycle.policy.lease_timeout_s,
                )
                return bodies.Leased(lease=lease, ended=False)
            if (
                time.monotonic() >= deadline
                or self.ending()
                or await request.is_disconnected()
            ):
                break
            await asyncio.sleep(_LEASE_POLL_S)
        return bodies.Leased(lease=None, ended=self.lifecycle.run_ended())

    async def open_sessions(
        self, request: Request, body: bodies.OpenBody
    ) -> bodies.Opened:
        """Open a session for each member, all of them or none. A repeated request with
        the same `request_id` gets the same sessions."""
        self._check_environment(request)
        terms = SessionTerms(
            task_id=body.task_id,
            group_id=body.group_id,
            purpose=body.purpose,
            sampling=_sampling(body.sampling, self.lifecycle.sampling),
            limits=_limits(body.limits, self.lifecycle.limits),
        )
        members = [
            GroupMember(index=member.index, attempt=member.attempt)
            for member in body.members
        ]
        opening = Opening(terms=terms, members=members, request_id=body.request_id)
        records = await self.lifecycle.open(opening)
        return self._opened(records)

    async def open_child(
        self, request: Request, session_id: str, body: bodies.ChildBody
    ) -> bodies.Opened:
        """Open a session for a sub-agent, with its own key and base URL; the answer
        lists this one session. Its `parent_id` is the session in the path. Its limits
        are the parent's, or lower ones."""
        parent = self._session(request, session_id)
        limits = _limits(body.limits, parent.session.limits)
        child = await self.lifecycle.open_child(parent, limits, body.request_id)
        return self._opened([child])

    async def reward_session(
        self, request: Request, session_id: str, body: bodies.RewardBody
    ) -> bodies.Rewarded:
        record = self._session(request, session_id)
        if body.turn and body.branch:
            reason = "a reward is of a turn or of a branch, not of both"
            raise SessionError(
                reason, status=400, code="invalid_request", param="branch"
            )
        await self.lifecycle.reward(record, body.value())
        return bodies.Rewarded(
            session_id=session_id, reward=body.reward, state=record.state
        )

    async def attach_numbers(
        self, request: Request, session_id: str, body: bodies.NumbersBody
    ) -> bodies.Attached:
        """Give the session numbers of the extra columns that the run declares. Later
        ones replace earlier ones of the same turn and name, until the session is
        finished."""
        record = self._session(request, session_id)
        await self.lifecycle.attach(record, body.extra())
        return bodies.Attached(session_id=session_id, state=record.state)

    async def finish_session(
        self, request: Request, session_id: str, body: bodies.FinishBody
    ) -> Outcome | Response:
        record = self._session(request, session_id)
        outcome = await self.lifecycle.finish(record, body.value(), body.extra())
        if outcome is not None:
            return outcome
        assert record.reward_deadline is not None
        unrewarded = bodies.Unrewarded(
            session_id=session_id, deadline=record.reward_deadline.unix_s
        )
        return JSONResponse(unrewarded.model_dump(), 202)

    async def abort_session(
        self, request: Request, session_id: str, body: bodies.AbortBody
    ) -> Outcome:
        record = self._session(request, session_id)
        return await self.lifecycle.abort(record, body.reason, body.detail)

    async def keep_session_alive(
        self, request: Request, session_id: str
    ) -> bodies.Heartbeat:
        """Show that an environment is alive that computes for a long time between two
        other calls."""
        record = self._session(request, session_id)
        return bodies.Heartbeat(
            session_id=session_id,
            state=record.state,
            session_idle_timeout_s=self.lifecycle.policy.idle_timeout_s or 0.0,
            held_s=record.held_s,
        )

    async def show_session(
        self, request: Request, session_id: str
    ) -> bodies.SessionView:
        record = self._session(request, session_id)
        conversation = self.lifecycle.turns.find(record)
        lines: list[dict[str, Json]] = []
        turns: list[Turn] = []
        delivered: set[str] = set()
        if conversation is not None:
            turns = conversation.turns
            delivered = conversation.delivered
            lines = await overview(conversation)
        return bodies.SessionView.of(
            record,
            model=self.model,
            turns=[bodies.TurnLine.model_validate(line) for line in lines],
            forks=Counter(turn.fork_reason for turn in turns if turn.fork_reason),
            auxiliary_roots=auxiliary_roots(turns, delivered),
        )

    async def show_metrics(self, request: Request) -> dict[str, Any]:
        self._check_environment(request)
        own_only = request.query_params.get("worker") == "own"
        return dict(await self.metrics.collect(all_workers=not own_only))

    async def show_schema(self, request: Request) -> dict[str, Any]:
        """Return all routes with their types, as OpenAPI describes them."""
        self._check_environment(request)
        return request.app.openapi()

    def authorize(self, request: Request) -> None:
        """Check the key before the body is read. Raises SessionError 401 unless the
        request carries a key for its route; 404 if the environment names an unknown
        session."""
        session_id = request.path_params.get("session_id")
        if session_id is None:
            self._check_environment(request)
        else:
            self._session(request, session_id).last_heard.update()

    def _opened(self, records: Sequence[SessionRecord]) -> bodies.Opened:
        sessions = [
            bodies.OpenedSession.of(record.session, self.model) for record in records
        ]
        return bodies.Opened(sessions=sessions)

    def _check_environment(self, request: Request) -> None:
        """Raise SessionError 401 unless the request carries the environment key."""
        if not self._is_environment(
            single_key_hash(request_keys(None, request.headers))
        ):
            raise unauthorized("this needs the environment key")

    def _session(self, request: Request, session_id: str) -> SessionRecord:
        """Return the session, open or closed. Raises SessionError 404 for the
        environment if there is none. Any other key gets SessionError 401, the same for
        a foreign session and for an unknown one, so that keys cannot be used to find
        out ids."""
        key_hash = single_key_hash(request_keys(None, request.headers))
        registry = self.lifecycle.registry
        if self._is_environment(key_hash):
            return registry.by_id(session_id)
        record = registry.find(session_id)
        if record is None or not hmac.compare_digest(key_hash, record.key_hash):
            raise unauthorized("this needs the environment key or the session's own")
        return record

    def _is_environment(self, key_hash: bytes) -> bool:
        return hmac.compare_digest(key_hash, hash_key(self.env_key))


def _router(route_class: type[APIRoute]) -> APIRouter:
    bearer = HTTPBearer(
        auto_error=False, description="the environment key, or a session's own"
    )
    refusals: dict[int | str, dict[str, Any]] = {"4XX": {"model": bodies.ErrorBody}}
    return APIRouter(
        responses=refusals, dependencies=[Security(bearer)], route_class=route_class
    )


def _sampling(asked: bodies.SamplingBody | None, default: Sampling) -> Sampling:
    if asked is None:
        return default
    max_new_tokens = asked.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = default.max_new_tokens
    return Sampling(
        temperature=asked.temperature, top_p=asked.top_p, max_new_tokens=max_new_tokens
    )


def _limits(asked: bodies.LimitsBody, most: SessionLimits) -> SessionLimits:
    """Return the requested limits, with `most` as the default. Raises SessionError 400
    for a limit above `most`."""
    lower = {name: value for name, value in asked if value is not None}
    for name, value in lower.items():
        if value > getattr(most, name):
            reason = f"limits.{name}: at most {getattr(most, name)} is granted"
            raise SessionError(
                reason, status=400, code="limit_too_high", param=f"limits.{name}"
            )
    return replace(most, **lower)
