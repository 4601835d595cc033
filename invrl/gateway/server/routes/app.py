"""The gateway's application: FastAPI over registry, conversations, store and engines.

Only the routes named here can be reached: the engines' and the router's own admin
routes have no counterpart.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from invrl.errors import SessionError
from invrl.gateway.gate.gate import Gate, GatedSampler
from invrl.gateway.gate.policies import gate_policy
from invrl.gateway.registry import SessionRegistry, WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.server.http.bounded_route import bounded_route
from invrl.gateway.server.http.refusals import FormatError, add_error_handlers
from invrl.gateway.server.routes.agent_routes import AgentRoutes
from invrl.gateway.server.routes.session_api import SessionRoutes
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.server.workers.forwarder import Forwarder
from invrl.gateway.server.workers.loop_lag import LoopLag
from invrl.gateway.server.workers.metrics import GatewayMetrics
from invrl.gateway.server.workers.peers import Peers
from invrl.gateway.server.workers.request_counts import (
    CountedApp,
    RequestCounts,
    route_names,
)
from invrl.gateway.session_record import SessionRecord
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.gateway.turns.reply_sampling import Sampler
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import MatchLevel
from invrl.host.output.traces import Traces
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.fleet import FleetSnapshot
from invrl.types.sessions import Sampling

_SESSION_BODY_BYTES = 2**20
"""Largest body of the session API, except for numbers of tokens: it is read and checked
in the event loop."""
_SAMPLING_PATH = re.compile(r"(?:/s/(?P<key>[^/]+))?/v1(?P<path>/.+)")
_GOOGLE_PATH = re.compile(
    r"(?:/s/(?P<key>[^/]+))?/v1(?:alpha|beta)?/models/(?P<model>.+):(?P<method>\w+)"
)
"""Path of Google's API, which names the model before the route."""


class _GatewayApp(FastAPI):
    """Serves the sampling routes before the layers of the framework, which take a sixth
    of a request's CPU time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sampling_endpoints: dict[str, ASGIApp] = {}
        """Endpoints by path, without the prefix."""
        self.outermost: ASGIApp = self.serve
        """Layer that gets each request first."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.outermost(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, parameters = _sampling_path(scope["path"])
            endpoint = self.sampling_endpoints.get(path)
            if endpoint is not None:
                scope["path_params"] = parameters
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the description of all routes. A body whose fields all have defaults
        may be left out."""
        description = super().openapi()
        schemas = description["components"]["schemas"]
        for methods in description["paths"].values():
            for operation in methods.values():
                body = operation.get("requestBody")
                if body is None:
                    continue
                reference = body["content"]["application/json"]["schema"]["$ref"]
                body["required"] = "required" in schemas[reference.rpartition("/")[2]]
        return description


def _sampling_path(path: str) -> tuple[str, Mapping[str, str | None]]:
    """Return the path of an agent's request below `/v1`, and the key and the model that
    it contains; "" if agents call no such path."""
    match = _GOOGLE_PATH.fullmatch(path)
    if match is not None:
        parameters = {"key": match["key"], "model": match["model"]}
        return f"/models:{match['method']}", parameters
    match = _SAMPLING_PATH.fullmatch(path)
    if match is not None:
        return match["path"], {"key": match["key"]}
    return "", {}


def make_app(
    settings: GatewaySettings,
    *,
    sampler: Sampler,
    eval_sampler: Sampler | None = None,
    renderer: Renderer,
    parsers: Parsers = Parsers(),  # noqa: B008 - a constant
    store: RunStoreWriter,
    place: WorkerPlace | None = None,
    traces: Traces | None = None,
    on_shutdown: Callable[[], Awaitable[object]],
    ending: Callable[[], bool] = lambda: False,
    run_ended: Callable[[], bool] = lambda: False,
    read_fleet: Callable[[], FleetSnapshot] = FleetSnapshot,
    note_held_turns: Callable[[int], None] = lambda _: None,
) -> FastAPI:
    """Make the application. `eval_sampler` samples in evaluation sessions; None:
    `sampler` does. `place` is that of the worker; sessions of this worker that are open
    in the store continue. `on_shutdown` is awaited after the last request.
    `ending`: whether the server shuts down, which ends waiting requests. `run_ended`:
    whether the run whose tasks environments lease is over. `read_fleet` returns the
    newest load of the engines. `note_held_turns` is called with the number of turns
    that the gate holds."""
    peers = Peers(place or WorkerPlace())
    reader = RunStore(Path(settings.store_path))
    registry = _make_registry(settings, peers.place, reader)
    samplers = [sampler] if eval_sampler is None else [sampler, eval_sampler]
    gates = _make_gates(
        settings,
        registry,
        read_fleet,
        note_held_turns,
        sets_engines_aside=eval_sampler is not None,
    )
    if gates:
        samplers = [
            GatedSampler(sampler, gate)
            for sampler, gate in zip(samplers, gates, strict=True)
        ]
    turns = Turns(
        sampler=samplers[0],
        eval_sampler=samplers[-1],
        renderer=renderer,
        parsers=parsers,
        store=store,
        reader=reader,
        context_length=settings.context_length,
        run_seed=settings.sampling_seed,
        match_level=MatchLevel[settings.match_level.upper()],
        constrained=settings.constrained,
        models=settings.model_names,
        recorded_top_logprobs=settings.record_top_logprobs,
        engine_return_s=settings.engine_return_s,
        space_wait_s=settings.space_wait_s,
    )
    lifecycle = _make_lifecycle(settings, registry, turns, store, run_ended)
    loop_lag = LoopLag()
    requests = RequestCounts()
    metrics = GatewayMetrics(
        settings=settings,
        registry=registry,
        lifecycle=lifecycle,
        turns=turns,
        gates=gates,
        loop_lag=loop_lag,
        requests=requests,
        peers=peers,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(lifecycle.expire_forever()),
            asyncio.create_task(loop_lag.measure()),
        ]
        tasks += [asyncio.create_task(gate.follow()) for gate in gates]
        yield
        for task in tasks:
            task.cancel()
        await on_shutdown()
        peers.close()
        reader.close()

    app = _GatewayApp(title="invrl gateway", lifespan=lifespan, openapi_url=None)
    app.get("/health")(_health)
    agent_routes = AgentRoutes(registry, turns, settings, traces)
    app.sampling_endpoints.update(agent_routes.sampling_endpoints())
    app.router.routes.extend(agent_routes.lookup_routes())
    _add_session_routes(app, settings, lifecycle, metrics, ending)

    def format_error(request: Request, error: SessionError) -> bytes:
        return agent_routes.dialect_for(request).error(error)

    add_error_handlers(app, format_error, agent_routes.note_refusal)
    _add_counting(app, requests)
    if len(peers.place.urls) > 1:
        _add_forwarding(app, settings, peers, format_error)
    if settings.cors_origins:
        app.outermost = _cors(app.serve, settings.cors_origins)
    return app


def _cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins call the gateway. They send their key themselves, so
    no cookie is allowed."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["*"],
    )


async def _health() -> dict[str, str]:
    return {"status": "ok"}


def _make_registry(
    settings: GatewaySettings, place: WorkerPlace, reader: RunStore
) -> SessionRegistry:
    """Return a registry with the sessions of this worker that are open in the store."""

    def recall_closed(name: str | bytes) -> SessionRecord | None:
        stored = reader.closed_session(name)
        if stored is None:
            return None
        return SessionRecord.restored(stored)

    registry = SessionRegistry(
        max_open=settings.session.max_open,
        ttl_s=settings.session.ttl_s,
        public_url=settings.url,
        secret=settings.env_key.get_secret_value().encode(),
        incarnation=settings.incarnation,
        place=place,
        recall_closed=recall_closed,
    )
    stored_sessions = reader.live_sessions(f"ses-{place.mark}")
    registry.restore([SessionRecord.restored(stored) for stored in stored_sessions])
    return registry


def _make_gates(
    settings: GatewaySettings,
    registry: SessionRegistry,
    read_fleet: Callable[[], FleetSnapshot],
    note_held_turns: Callable[[int], None],
    *,
    sets_engines_aside: bool,
) -> list[Gate]:
    """Return the gate of all sessions. If engines are set aside for evaluation, return
    the gate of all other sessions, and then that of evaluation. Empty without a
    policy."""
    if settings.gate is None:
        return []
    make_gate = partial(
        Gate,
        gate_policy(settings.gate.policy),
        max_hold_s=settings.gate.max_hold_s,
        share=lambda: registry.share,
        sends_priority=settings.priority_scheduling,
    )
    if not sets_engines_aside:
        return [
            make_gate(
                open_sessions=registry.open_records,
                read_fleet=read_fleet,
                note_held_turns=note_held_turns,
            )
        ]

    def open_sessions(evaluation: bool) -> list[SessionRecord]:
        return [
            record
            for record in registry.open_records()
            if (record.session.purpose == "eval") == evaluation
        ]

    def read_engines(evaluation: bool) -> FleetSnapshot:
        return read_fleet().serving(evaluation=evaluation)

    return [
        make_gate(
            open_sessions=partial(open_sessions, False),
            read_fleet=partial(read_engines, False),
            note_held_turns=note_held_turns,
        ),
        make_gate(
            open_sessions=partial(open_sessions, True),
            read_fleet=partial(read_engines, True),
        ),
    ]


def _make_lifecycle(
    settings: GatewaySettings,
    registry: SessionRegistry,
    turns: Turns,
    store: RunStoreWriter,
    run_ended: Callable[[], bool],
) -> Lifecycle:
    leases = None
    if settings.leases:
        leases = LeaseStore(
            Path(settings.store_path), heartbeat_timeout_s=settings.heartbeat_timeout_s
        )
    return Lifecycle(
        registry=registry,
        turns=turns,
        store=store,
        sampling=Sampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens,
        ),
        policy=settings.session,
        late=settings.late,
        leases=leases,
        run_ended=run_ended,
    )


def _add_session_routes(
    app: FastAPI,
    settings: GatewaySettings,
    lifecycle: Lifecycle,
    metrics: GatewayMetrics,
    ending: Callable[[], bool],
) -> None:
    routes = SessionRoutes(
        env_key=settings.env_key.get_secret_value(),
        model=settings.model_name,
        lifecycle=lifecycle,
        metrics=metrics,
        ending=ending,
    )
    route_class = bounded_route(
        authorize=routes.authorize,
        limit=min(settings.max_body_bytes, _SESSION_BODY_BYTES),
        deadline_s=settings.body_timeout_s,
    )
    app.include_router(routes.router(route_class))
    large_route_class = bounded_route(
        authorize=routes.authorize,
        limit=settings.max_body_bytes,
        deadline_s=settings.body_timeout_s,
    )
    app.include_router(routes.numbers_router(large_route_class))


def _add_counting(app: _GatewayApp, requests: RequestCounts) -> None:
    """Count requests that this worker answers. Those that it forwards are counted by
    their owner."""
    for path, endpoint in app.sampling_endpoints.items():
        app.sampling_endpoints[path] = CountedApp(
            endpoint, counts=requests, route_of=_sampling_route(path)
        )
    app.add_middleware(
        CountedApp, counts=requests, route_of=route_names(app.router.routes)
    )


def _sampling_route(path: str) -> Callable[[Scope], str]:
    return lambda _: f"/v1{path}"


def _add_forwarding(
    app: _GatewayApp,
    settings: GatewaySettings,
    peers: Peers,
    format_error: FormatError,
) -> None:
    """Forward requests for sessions of other workers."""
    app.add_middleware(
        Forwarder, peers=peers, settings=settings, format_error=format_error
    )
    for path, endpoint in app.sampling_endpoints.items():
        app.sampling_endpoints[path] = Forwarder(
            endpoint, peers=peers, settings=settings, format_error=format_error
        )
