"""The HTTP server of `invrl view`: the static page, and the data that it shows, as
JSON.

Every request passes `access.py` first. Handlers run in threads, because they read
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
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invrl import __version__
from invrl.errors import ConfigError, DamagedFileError, InvrlError
from invrl.viewer.access import HEADERS, Access, Refusal, without_key
from invrl.viewer.rollout_queries import Parameters, read_page
from invrl.viewer.run_watch import RunWatch
from invrl.viewer.viewed_run import ViewedRun

PAGE_FOLDER = Path(__file__).parent / "page"
MAX_METRICS = 200
"""Most names of metrics in one request."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
}
_KEEP_ALIVE_S = 15.0
_SHUTDOWN_S = 2

Answer = Callable[[ViewedRun, Parameters, str], Any]


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
                own = {name for name, _ in message["headers"]}
                added = [
                    (name.lower().encode(), value.encode())
                    for name, value in HEADERS.items()
                ]
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in added if pair[0] not in own),
                ]
            await send(message)

        response = self._early_answer(scope)
        if response is None:
            await self._app(scope, receive, send_with_headers)
        else:
            await response(scope, receive, send_with_headers)

    def _early_answer(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        query = scope["query_string"].decode("latin-1")
        key = QueryParams(query).get("key", "")
        refusal = self._access.refusal(
            scope["method"], headers.get("host", ""), headers, key
        )
        if refusal is not None:
            return _refused(refusal)
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
        self._files = _page_files()

    def app(self, access: Access) -> ASGIApp:
        routes = [
            Route("/api/runs", self._all_runs),
            Route("/api/config", self._configurations),
            Route("/api/metric-names", self._metric_names),
            Route("/api/metrics", self._metrics),
            Route("/api/events", self._events),
            Route("/api/runs/{run}/rollouts/{name:path}", self._about(_rollout)),
            Route("/api/runs/{run}/turns/{name:path}/tokens", self._about(_tokens)),
            Route("/api/runs/{run}/replies/{name:path}", self._about(_replies)),
            Route("/api/runs/{run}/{name}", self._about(_run_page)),
            Route("/api/{rest:path}", self._no_such_page),
            Route("/data/manifest.js", self._manifest),
            Route("/{path:path}", self._file),
        ]
        return AccessGuard(Starlette(routes=routes), access)

    async def _all_runs(self, request: Request) -> Response:
        del request
        return await _in_thread(lambda: runs_page(list(self._runs.values())))

    async def _configurations(self, request: Request) -> Response:
        from invrl.viewer.run_pages import configurations_page

        return await _in_thread(lambda: configurations_page(self._chosen(request)))

    async def _metric_names(self, request: Request) -> Response:
        from invrl.viewer.run_pages import metric_names_page

        text = request.query_params.get("q", "")
        return await _in_thread(lambda: metric_names_page(self._chosen(request), text))

    async def _metrics(self, request: Request) -> Response:
        from invrl.viewer.run_pages import metrics_page

        names = request.query_params.getlist("name")[:MAX_METRICS]
        return await _in_thread(lambda: metrics_page(self._chosen(request), names))

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

    def _about(self, answer: Answer) -> Callable[[Request], Any]:
        """Return the handler of a page of one run."""

        async def handle(request: Request) -> Response:
            query = request.query_params
            parameters = {name: query.getlist(name) for name in query}
            name = request.path_params.get("name", "")
            return await _in_thread(
                lambda: answer(self._run(request.path_params["run"]), parameters, name)
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

    async def _no_such_page(self, request: Request) -> Response:
        return _not_found(request.url.path)

    async def _manifest(self, request: Request) -> Response:
        """Return an empty manifest. In an export this file names the exported data."""
        del request
        return Response("window.invrlExport = null;\n", media_type=_TYPES[".js"])

    async def _file(self, request: Request) -> Response:
        name = request.path_params["path"] or "index.html"
        path = self._files.get(name)
        if path is None:
            return _not_found(request.url.path)
        return FileResponse(path, media_type=_TYPES[path.suffix])


def _page_files() -> dict[str, Path]:
    """Return the files of the page by their names in a URL. A name from outside is
    looked up here and never becomes a path."""
    files = [
        path
        for path in PAGE_FOLDER.rglob("*")
        if path.suffix in _TYPES and path.is_file()
    ]
    return {path.relative_to(PAGE_FOLDER).as_posix(): path for path in files}


class _NoSuchPage(Exception):
    """Raised for a page that the run does not have."""


def runs_page(runs: Sequence[ViewedRun]) -> Any:
    for run in runs:
        run.metrics.refresh()
    return {"runs": [run.overview() for run in runs], "version": __version__}


def _rollout(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    from invrl.viewer.conversation_page import rollout_detail

    detail = rollout_detail(run, name, full=_is_full(parameters))
    if detail is None:
        raise _NoSuchPage(f"the run has no rollout {name!r}, or it is not indexed yet")
    return detail


def _tokens(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    from invrl.viewer.conversation_page import turn_tokens

    tokens = turn_tokens(run, name, full=_is_full(parameters))
    if tokens is None:
        raise _NoSuchPage(f"the run has no turn {name!r}")
    return tokens


def _run_page(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    from invrl.viewer.run_pages import RUN_PAGES

    if name not in RUN_PAGES:
        raise _NoSuchPage(f"there is no page {name!r} of a run")
    return RUN_PAGES[name](run, parameters, read_page(parameters))


def _replies(run: ViewedRun, parameters: Parameters, name: str) -> Any:
    from invrl.viewer.last_replies import last_replies

    del parameters
    return last_replies(run, name)


def _is_full(parameters: Parameters) -> bool:
    return "1" in parameters.get("full", ())


# ----------------------------------------------------------------- answers


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


def _not_found(path: str) -> Response:
    return _error(
        404, f"there is no page {path!r}", fix="open the page's first address"
    )


def _refused(refusal: Refusal) -> Response:
    return _error(refusal.status, refusal.reason, fix=refusal.fix)


# ----------------------------------------------------------------- the process


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: a free one. Raises ConfigError if the address
    is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        field, value = ("--port", str(port)) if port else ("--host", host)
        fix = "choose another --port, or leave it out for a free one; --host must be an address of this machine"
        raise ConfigError(
            field, value, f"cannot listen on {host}:{port}: {error}", fix
        ) from error
    listener.listen(128)
    return listener


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
