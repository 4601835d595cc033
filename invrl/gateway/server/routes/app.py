"""The gateway's application: FastAPI over the parts of a worker.

Only the routes named here can be reached: the engines' and the router's own admin
routes have no counterpart.
"""

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from invrl.errors import SessionError
from invrl.gateway.registry import WorkerPlace
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.rendering.replies.parsers import Parsers
from invrl.gateway.server.http.bounded_route import bounded_route
from invrl.gateway.server.http.refusals import FormatError, add_error_handlers
from invrl.gateway.server.routes.agent_routes import AgentRoutes
from invrl.gateway.server.routes.session_api import SessionRoutes
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.server.workers.forwarder import Forwarder
from invrl.gateway.server.workers.metrics import GatewayMetrics
from invrl.gateway.server.workers.peers import Peers
from invrl.gateway.server.workers.request_counts import (
    CountedApp,
    RequestCounts,
    route_names,
)
from invrl.gateway.server.workers.worker_parts import WorkerParts, make_parts
from invrl.gateway.turns.reply_sampling import Sampler
from invrl.host.output.traces import Traces
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.fleet import FleetSnapshot

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
    parts = make_parts(
        settings,
        samplers=[sampler] if eval_sampler is None else [sampler, eval_sampler],
        renderer=renderer,
        parsers=parsers,
        store=store,
        place=place or WorkerPlace(),
        run_ended=run_ended,
        read_fleet=read_fleet,
        note_held_turns=note_held_turns,
    )
    app = _GatewayApp(
        title="invrl gateway",
        lifespan=partial(_lifespan, parts, on_shutdown),
        openapi_url=None,
    )
    app.get("/health")(_health)
    agent_routes = AgentRoutes(parts.registry, parts.turns, settings, traces)
    app.sampling_endpoints.update(agent_routes.sampling_endpoints())
    app.router.routes.extend(agent_routes.lookup_routes())
    _add_session_routes(app, parts, ending)

    def format_error(request: Request, error: SessionError) -> bytes:
        return agent_routes.dialect_for(request).error(error)

    add_error_handlers(app, format_error, agent_routes.note_refusal)
    _add_counting(app, parts.requests)
    if len(parts.peers.place.urls) > 1:
        _add_forwarding(app, settings, parts.peers, format_error)
    if settings.cors_origins:
        app.outermost = _cors(app.serve, settings.cors_origins)
    return app


@contextlib.asynccontextmanager
async def _lifespan(
    parts: WorkerParts, on_shutdown: Callable[[], Awaitable[object]], _: FastAPI
) -> AsyncIterator[None]:
    async with parts.running():
        yield
    await on_shutdown()
    parts.close()


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


def _add_session_routes(
    app: FastAPI, parts: WorkerParts, ending: Callable[[], bool]
) -> None:
    settings = parts.settings
    routes = SessionRoutes(
        env_key=settings.env_key.get_secret_value(),
        model=settings.model_name,
        lifecycle=parts.lifecycle,
        metrics=GatewayMetrics(parts),
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
