"""The gateway put together: one FastAPI application over registry, conversations, store and engine.

Nothing but these routes is reachable: the fleet's own admin routes have no counterpart here."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from invrl.errors import SessionError
from invrl.gateway.dialects.chat import ChatDialect
from invrl.gateway.dialects.completions import CompletionsDialect
from invrl.gateway.dialects.dialect import Dialect
from invrl.gateway.dialects.messages import MessagesDialect
from invrl.gateway.dialects.responses import ResponsesDialect
from invrl.gateway.registry import SessionRecord, SessionRegistry, WorkerPlace
from invrl.gateway.rendering.parsers import Parsers
from invrl.gateway.rendering.renderer import Renderer
from invrl.gateway.server.agent_api import AgentEndpoint, CountEndpoint, retry_after, session_keys
from invrl.gateway.server.bounded_route import bounded_route
from invrl.gateway.server.forwarder import Forwarder
from invrl.gateway.server.loop_lag import LoopLag
from invrl.gateway.server.peers import Peers
from invrl.gateway.server.session_api import SessionRoutes
from invrl.gateway.server.settings import GatewaySettings
from invrl.gateway.sessions.closing import token_shares
from invrl.gateway.sessions.lifecycle import Lifecycle
from invrl.gateway.turns.generation import Engine
from invrl.gateway.turns.recovery import restored_record
from invrl.gateway.turns.turns import Turns
from invrl.gateway.types import MatchLevel
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types import Sampling

_log = logging.getLogger(__name__)
_CODES = {404: "not_found", 405: "method_not_allowed"}
_SESSION_BODY_BYTES = 2**20
"""The most that a request of the session API may have: it is read and checked in the event loop."""
_AGENT_PREFIXES = ("/v1", "/s/{key}/v1")
_SAMPLING_PATH = re.compile(r"(?:/s/(?P<key>[^/]+))?/v1(?P<path>/.+)")


class _App(FastAPI):
    """Sampling routes are served before the framework's layers, which take a sixth of a request's CPU."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.sampling: dict[str, ASGIApp] = {}
        """By path, without prefix."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _SAMPLING_PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        endpoint = self.sampling.get(found["path"]) if found else None
        if found and endpoint:
            scope["path_params"] = {"key": found["key"]}
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def make_app(
    settings: GatewaySettings,
    *,
    engine: Engine,
    renderer: Renderer,
    parsers: Parsers = Parsers(),  # noqa: B008 - a constant
    store: RunStoreWriter,
    place: WorkerPlace | None = None,
    on_shutdown: Callable[[], Awaitable[object]],
    ending: Callable[[], bool] = lambda: False,
    run_ended: Callable[[], bool] = lambda: False,
) -> FastAPI:
    """`place`: which of the gateway's workers this is. What it holds in the store goes on. `on_shutdown` runs
    after the last request; `ending` says whether the server takes no more of them, which ends what waits.
    `run_ended`: whether the run that environments lease tasks of is over."""
    peers, reader = Peers(place or WorkerPlace()), RunStore(Path(settings.store_path))
    registry = _registry(settings, peers.place, reader)
    turns = Turns(
        engine=engine,
        renderer=renderer,
        parsers=parsers,
        store=store,
        reader=reader,
        context_length=settings.context_length,
        run_seed=settings.sampling_seed,
        match_level=MatchLevel[settings.match_level.upper()],
        constrained=settings.constrained,
    )
    sampling = Sampling(**settings.model_dump(include={"temperature", "top_p", "max_new_tokens"}))
    leases = None
    if settings.leases:
        leases = LeaseStore(Path(settings.store_path), heartbeat_timeout_s=settings.heartbeat_timeout_s)
    parts = {"registry": registry, "turns": turns, "store": store, "leases": leases}
    lifecycle = Lifecycle(**parts, sampling=sampling, policy=settings, run_ended=run_ended)
    lag = LoopLag()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        background = [asyncio.create_task(lifecycle.expire_forever()), asyncio.create_task(lag.measure())]
        yield
        for task in background:
            task.cancel()
        await on_shutdown()
        await peers.close()
        reader.close()

    async def metrics(of_all: bool) -> Mapping[str, object]:
        measured = {"tokens": lifecycle.tokens, "sessions": registry.counts(), "loop_lag_ms": lag.summary()}
        measured["workers"] = {str(peers.place.number): {"starts": peers.place.starts, **lag.summary()}}
        found: Mapping[str, Any] = {"run_id": settings.run_id, **measured, **turns.metrics()}
        if of_all:
            found = await peers.metrics(found, settings.env_key.get_secret_value())
        return {**found, **token_shares(found["tokens"])}

    app = _App(title="invrl gateway", lifespan=lifespan, docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    spoken = _add_agent_routes(app, registry, turns, settings)
    env_key = settings.env_key.get_secret_value()
    routes = SessionRoutes(
        env_key=env_key, model=settings.model_name, lifecycle=lifecycle, metrics=metrics, ending=ending
    )
    bounded = bounded_route(
        authorize=routes.authorize,
        limit=min(settings.max_body_bytes, _SESSION_BODY_BYTES),
        deadline_s=settings.body_timeout_s,
    )
    app.include_router(routes.router(bounded))
    _add_error_handlers(app, spoken)
    if len(peers.place.urls) > 1:

        def refusal(scope: Scope, error: SessionError) -> bytes:
            return spoken(Request(scope)).error(error)

        forwarding = {"peers": peers, "settings": settings, "refusal": refusal}
        app.add_middleware(Forwarder, **forwarding)
        app.sampling = {path: Forwarder(each, **forwarding) for path, each in app.sampling.items()}
    return app


def _registry(settings: GatewaySettings, place: WorkerPlace, reader: RunStore) -> SessionRegistry:
    """With the sessions of this worker that are open in the store."""

    registry = SessionRegistry(
        max_open=settings.max_open_sessions,
        ttl_s=settings.session_ttl_s,
        public_url=settings.url,
        secret=settings.env_key.get_secret_value().encode(),
        incarnation=settings.incarnation,
        place=place,
        recall=lambda name: (stored := reader.closed_session(name)) and restored_record(stored),
    )
    registry.restore(map(restored_record, reader.live_sessions(f"ses-{place.mark}")))
    return registry


def _add_agent_routes(
    app: _App, registry: SessionRegistry, turns: Turns, settings: GatewaySettings
) -> Callable[[Request], ChatDialect | MessagesDialect]:
    """Returns what a client expects of routes that are no dialect's own, by its request."""
    name, vocab_size, token_text = settings.model_name, settings.vocab_size, turns.renderer.token_text
    openais = {"model": name, "vocab_size": vocab_size, "token_text": token_text}
    chat, messages = ChatDialect(**openais), MessagesDialect(model=name)
    responses = ResponsesDialect(**openais)
    dialects: list[Dialect[Any]] = [chat, CompletionsDialect(**openais), responses, messages]

    def spoken(request: Request) -> ChatDialect | MessagesDialect:
        anthropic = "anthropic-version" in request.headers or "/v1/messages" in request.url.path
        return messages if anthropic else chat

    def asker(request: Request) -> SessionRecord:
        record = registry.by_key(session_keys(request.path_params.get("key"), dict(request.headers)))
        record.life.see()
        return record

    async def models(request: Request) -> Response:
        asker(request)
        shown = spoken(request).models(request.path_params.get("id", ""))
        return Response(shown, media_type="application/json")

    async def response(request: Request) -> Response:
        find = turns.conversation(asker(request)).forest.turn
        shown = responses.again(request.path_params["id"], find, request.query_params.multi_items())
        return Response(shown, media_type="application/json")

    served = {"registry": registry, "turns": turns, "settings": settings}
    app.sampling = {each.path: AgentEndpoint(dialect=each, **served) for each in dialects}
    app.sampling[messages.path + "/count_tokens"] = CountEndpoint(dialect=messages, **served)
    for prefix in _AGENT_PREFIXES:
        for path, answer in (
            ("/models", models),
            ("/models/{id:path}", models),
            ("/responses/{id}", response),
        ):
            app.router.routes.append(Route(prefix + path, answer, methods=["GET"]))
    return spoken


def _add_error_handlers(app: FastAPI, spoken: Callable[[Request], ChatDialect | MessagesDialect]) -> None:
    """Every refusal has the shape that agents' clients know."""

    async def refuse(request: Request, error: Exception) -> Response:
        told = _told(request, error)
        told.message = told.message.encode(errors="replace").decode()  # no JSON carries lone surrogates
        allowed = (error.headers or {}) if isinstance(error, HTTPException) else {}
        headers, body = {**allowed, **retry_after(told)}, spoken(request).error(told)
        return Response(body, status_code=told.status, headers=headers, media_type="application/json")

    for kind in (SessionError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)


def _told(request: Request, error: Exception) -> SessionError:
    if isinstance(error, SessionError):
        return error
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:])
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        return SessionError(message, status=400, code="invalid_request", param=place or None)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path.partition('/s/')[0] or '/s/…'}: {error.detail}"
        code = _CODES.get(error.status_code, "invalid_request")
        return SessionError(message, status=error.status_code, code=code)
    _log.error("a request failed inside of the gateway", exc_info=error)
    return SessionError("internal error", status=500, code="internal_error")
