"""The HTTP server of `invrl view`: the static page, and the data that it shows, as
JSON.

Every request passes `access.py` first. Pages are built in threads, because that reads
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invrl import __version__
from invrl.errors import ConfigError, DamagedFileError, InvrlError
from invrl.viewer.access import HEADERS, Access, without_key
from invrl.viewer.conversation_page import rollout_detail
from invrl.viewer.last_replies import last_replies
from invrl.viewer.rollout_queries import Parameters, read_page
from invrl.viewer.run_pages import (
    RUN_PAGES,
    configurations_page,
    metric_names_page,
    metrics_page,
)
from invrl.viewer.run_watch import RunWatch
from invrl.viewer.turn_tokens import turn_tokens
from invrl.viewer.viewed_run import ViewedRun

PAGE_FOLDER = Path(__file__).parent / "page"
MAX_METRICS = 200
"""Most names of metrics in one request."""
_KEEP_ALIVE_S = 15.0
_SHUTDOWN_S = 2

Handler = Callable[[Request], Any]
RunPage = Callable[[ViewedRun, Parameters, str], Any]
"""Builds a page of one run from the URL's query and the name in its path."""
RunsPage = Callable[[Sequence[ViewedRun], QueryParams], Any]


class AccessGuard:
    """Refuses what `access` refuses, sets the cookie, and adds the headers to every
    response."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        response = self._early_response(scope)
        if response is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await response(scope, receive, send_with_headers)

    def _early_response(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        query = scope["query_string"].decode("latin-1")
        key = QueryParams(query).get("key", "")
        refusal = self._access.refusal(
            scope["method"], headers.get("host", ""), headers, key
        )
        if refusal is not None:
            return _error(refusal.status, refusal.reason, fix=refusal.fix)
        if key:
            rest = without_key(query)
            target = "./" + scope["path"].rpartition("/")[2]
            if rest:
                target += f"?{rest}"
            return RedirectResponse(
                target, status_code=303, headers={"set-cookie": self._access.cookie}
            )
        return None


class PageServer:
    """Routes over these runs."""

    def __init__(self, runs: Sequence[ViewedRun], watch: RunWatch) -> None:
        self._runs = {run.id: run for run in runs}
        self._watch = watch

    def app(self, access: Access) -> ASGIApp:
        routes = [
            Route("/api/runs", self._about_several(lambda runs, _: runs_page(runs))),
            Route(
                "/api/config",
                self._about_several(lambda runs, _: configurations_page(runs)),
            ),
            Route(
                "/api/metric-names",
                self._about_several(
                    lambda runs, query: metric_names_page(runs, query.get("q", ""))
                ),
            ),
            Route(
                "/api/metrics",
                self._about_several(
                    lambda runs, query: metrics_page(
                        runs, query.getlist("name")[:MAX_METRICS]
                    )
                ),
            ),
            Route("/api/events", self._events),
            Route("/api/runs/{run}/rollouts/{name:path}", self._about(_rollout)),
            Route("/api/runs/{run}/turns/{name:path}/tokens", self._about(_tokens)),
            Route("/api/runs/{run}/replies/{name:path}", self._about(_replies)),
            Route("/api/runs/{run}/{name}", self._about(_run_page)),
            Route("/data/manifest.js", _manifest),
            Mount("/", StaticFiles(directory=PAGE_FOLDER, html=True)),
        ]
        handlers = {404: _no_such_file}
        return AccessGuard(
            Starlette(routes=routes, exception_handlers=handlers), access
        )

    def _chosen(self, request: Request) -> list[ViewedRun]:
        """Return the runs that the query names; all if it names none. Raises
        ConfigError for an unknown one."""
        names = [
            name for name in request.query_params.get("runs", "").split(",") if name
        ]
        return [self._run(name) for name in names or self._runs]

    def _run(self, name: str) -> ViewedRun:
        run = self._runs.get(name)
        if run is None:
            raise ConfigError(
                "run", name, "no such run is viewed", f"one of: {', '.join(self._runs)}"
            )
        return run

    def _about_several(self, page: RunsPage) -> Handler:
        """Return the handler of a page of the runs that the query names."""

        async def handle(request: Request) -> Response:
            return await _in_thread(
                lambda: page(self._chosen(request), request.query_params)
            )

        return handle

    def _about(self, page: RunPage) -> Handler:
        """Return the handler of a page of one run."""

        async def handle(request: Request) -> Response:
            query = request.query_params
            parameters = {name: query.getlist(name) for name in query}
            name = request.path_params.get("name", "")
            return await _in_thread(
                lambda: page(self._run(request.path_params["run"]), parameters, name)
            )

        return handle

    async def _events(self, request: Request) -> Response:
        del request
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        with self._watch.subscribed() as changes:
            yield b": hello\n\n"
            while True:
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_S):
                        change = await changes.get()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                if change is None:
                    return
                yield b"event: change\ndata: " + encoded(change) + b"\n\n"


async def _manifest(request: Request) -> Response:
    """Return an empty manifest. In an export this file names the exported data."""
    del request
    return Response("window.invrlExport = null;\n", media_type="text/javascript")


async def _no_such_file(request: Request, error: Exception) -> Response:
    del error
    reason = f"there is no page {request.url.path!r}"
    return _error(404, reason, fix="open the page's first address")


class _NoSuchPage(Exception):
    """Raised for a page that the run does not have."""


def runs_page(runs: Sequence[ViewedRun]) -> Any:
    for run in runs:
        run.metrics.refresh()
    return {"runs": [run.overview() for run in runs], "version": __version__}


def _rollout(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    detail = rollout_detail(run, name, full=_is_full(parameters))
    if detail is None:
        raise _NoSuchPage(f"the run has no rollout {name!r}, or it is not indexed yet")
    return detail


def _tokens(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    tokens = turn_tokens(run, name, full=_is_full(parameters))
    if tokens is None:
        raise _NoSuchPage(f"the run has no turn {name!r}")
    return tokens


def _run_page(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    if name not in RUN_PAGES:
        raise _NoSuchPage(f"there is no page {name!r} of a run")
    return RUN_PAGES[name](run, parameters, read_page(parameters))


def _replies(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    del parameters
    return last_replies(run, name)


def _is_full(parameters: Parameters) -> bool:
    return "1" in parameters.get("full", ())


# ----------------------------------------------------------------- responses


async def _in_thread(work: Callable[[], Any]) -> Response:
    """Return the result of `work` as JSON, or the error that it raises."""
    try:
        return _json(await run_in_threadpool(lambda: encoded(work())))
    except ConfigError as error:
        status = 404 if error.field == "run" else 400
        return _error(
            status,
            error.reason,
            field=error.field,
            value=str(error.value),
            fix=error.fix,
        )
    except _NoSuchPage as error:
        return _error(404, str(error), fix="go back to the list of rollouts")
    except DamagedFileError as error:
        return _error(503, f"{error.path}: {error.reason}", fix=error.fix)
    except InvrlError as error:
        return _error(503, str(error), fix="look at the notes of the run")
    except OSError as error:
        return _error(
            503,
            f"the run's folder cannot be read: {error}",
            fix="check that it is still there",
        )


def encoded(body: Any) -> bytes:
    """Encode as JSON. Numbers that are not finite are null; text that is not Unicode
    has question marks."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return msgspec.json.encode(_whole_text(body))


def _whole_text(body: Any) -> Any:
    """Return the same with lone surrogates replaced."""
    if isinstance(body, str):
        return body.encode("utf-8", "replace").decode()
    if isinstance(body, dict):
        return {_whole_text(name): _whole_text(value) for name, value in body.items()}
    if isinstance(body, list | tuple):
        return [_whole_text(value) for value in body]
    return body


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type="application/json")


def _error(
    status: int, reason: str, *, field: str = "", value: str = "", fix: str = ""
) -> Response:
    message = f"{field} = {value!r}: {reason}" if field else reason
    error = {
        "message": message,
        "field": field,
        "value": value,
        "reason": reason,
        "fix": fix,
    }
    return _json(encoded({"error": error}), status)


# ----------------------------------------------------------------- the process


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: a free one. Raises ConfigError if the address
    is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        field, value = ("--port", str(port)) if port else ("--host", host)
        fix = "choose another --port, or leave it out for a free one; --host must be an address of this machine"
        raise ConfigError(
            field, value, f"cannot listen on {host}:{port}: {error}", fix
        ) from error


async def serve(
    runs: Sequence[ViewedRun], access: Access, listener: socket.socket
) -> None:
    """Serve until SIGINT or SIGTERM, and then end every open stream."""
    watch = RunWatch(runs)
    config = uvicorn.Config(
        PageServer(runs, watch).app(access),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config, watch)
    watch.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        await watch.stop()


class _Server(uvicorn.Server):
    """Ends the streams of changes first: uvicorn waits for open responses."""

    def __init__(self, config: uvicorn.Config, watch: RunWatch) -> None:
        super().__init__(config)
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._watch.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await super().shutdown(sockets)
