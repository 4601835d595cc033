"""Serves a run's metrics over HTTP, in threads of the driver.

`/metrics` has the run's own numbers; `/metrics/NAME` forwards the metrics of another
server of the run (the router, an engine), whose port changes at each start. Invariants:
it is read-only and serves nothing else; on a loopback address it answers only requests
for a loopback name, so that no web site whose name is made to resolve here can read it
through a browser; each request and each response has a deadline; it ends with the
driver.
"""

import io
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from invrl.host.network.direct_connections import direct_client

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)
PATH = "/metrics"
_UPSTREAM_DEADLINE_S = 5.0
_CLIENT_DEADLINE_S = 10.0
"""A client that has not sent its whole request by then, or has not read the whole
response, is disconnected."""
_MAX_CONNECTIONS = 64
"""Most concurrent connections. Further ones are closed immediately."""
_MAX_SCRAPES = 8
"""Most concurrent scrapes. Prometheus makes one."""
_STOP_TIMEOUT_S = 5.0
_TEXT = ("Content-Type", "text/plain; charset=utf-8")

Upstreams = Callable[[], Mapping[str, str]]
"""Returns the current addresses of the other servers' metrics, by name."""


class _RequestStream(io.RawIOBase):
    """Stream of a client's request. Raises TimeoutError at the deadline, even if bytes
    keep trickling in."""

    def __init__(self, client: socket.socket, deadline_s: float) -> None:
        self._client = client
        self._ends_at = time.monotonic() + deadline_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        left_s = self._ends_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not whole")
        allowed_s = self._client.gettimeout()
        self._client.settimeout(left_s)
        try:
            return self._client.recv_into(buffer)
        finally:
            self._client.settimeout(allowed_s)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_DEADLINE_S

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(
            _RequestStream(self.connection, _CLIENT_DEADLINE_S)
        )

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    free_connections: threading.BoundedSemaphore

    def server_bind(self) -> None:
        """Bind without looking up the host name, which may wait for a name server."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()
        self.free_connections = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the request in its own thread, unless there are too many."""
        if self.free_connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free_connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape broke off", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """HTTP server of the metrics. Call `stop` at the end. Raises OSError if it cannot
    listen."""

    def __init__(
        self, collector: Collector, *, host: str, port: int, upstreams: Upstreams = dict
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._own = make_wsgi_app(registry)
        self._is_private = _is_loopback(host)
        self._upstreams = upstreams
        self._free = threading.BoundedSemaphore(_MAX_SCRAPES)
        server_class = _Server6 if ":" in host else _Server
        self._server = make_server(host, port, self._respond, server_class, _Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port, without waiting for a scrape in progress."""
        self._server.shutdown()
        self._server.socket.close()
        self._thread.join(_STOP_TIMEOUT_S)

    def _respond(
        self, environ: dict[str, Any], start_response: "StartResponse"
    ) -> Iterable[bytes]:
        asked_host = str(environ.get("HTTP_HOST", ""))
        if (
            self._is_private
            and asked_host
            and not _is_loopback(_without_port(asked_host))
        ):
            reason = "only 127.0.0.1, ::1 and localhost are served here"
            return _refuse(start_response, HTTPStatus.MISDIRECTED_REQUEST, reason)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _refuse(start_response, HTTPStatus.METHOD_NOT_ALLOWED, "GET only")
        if not self._free.acquire(blocking=False):
            return _refuse(
                start_response,
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{_MAX_SCRAPES} scrapes at a time",
            )
        try:
            path = str(environ.get("PATH_INFO", ""))
            if path.rstrip("/") == PATH:
                return self._own(environ, start_response)
            name = path.removeprefix(PATH + "/")
            urls = self._upstreams()
            if name not in urls:
                paths = ", ".join([PATH, *(f"{PATH}/{other}" for other in urls)])
                return _refuse(
                    start_response, HTTPStatus.NOT_FOUND, f"there are: {paths}"
                )
            return _pass_on(name, urls[name], start_response)
        finally:
            self._free.release()


def _is_loopback(host: str) -> bool:
    """Whether a name or an address can only mean this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    """Return the name or address in a Host header."""
    name, colon, port = host.rpartition(":")
    if colon and (port.isdecimal() or not port):
        return name
    return host


def _pass_on(name: str, url: str, start_response: "StartResponse") -> Iterable[bytes]:
    try:
        with (
            direct_client(url, timeout_s=_UPSTREAM_DEADLINE_S) as http,
            http.stream("GET", url) as response,
        ):
            status = response.status_code
            body = _read(response)
            content_type = response.headers.get("Content-Type", _TEXT[1])
    except (httpx.HTTPError, TimeoutError) as error:
        return _refuse(
            start_response, HTTPStatus.BAD_GATEWAY, f"{name} does not answer: {error}"
        )
    if status != HTTPStatus.OK:
        reason = f"{name} answered {status}"
        if status == HTTPStatus.NOT_FOUND and not name.endswith("router"):
            reason += ": an engine shows its metrics with --sglang-enable-metrics"
        return _refuse(start_response, HTTPStatus.BAD_GATEWAY, reason)
    start_response(
        "200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    )
    return [body]


def _read(response: httpx.Response) -> bytes:
    """Return the whole body. Raises TimeoutError if it is too slow, even if bytes keep
    arriving."""
    ends_at = time.monotonic() + _UPSTREAM_DEADLINE_S
    chunks: list[bytes] = []
    for chunk in response.iter_bytes():
        chunks.append(chunk)
        if time.monotonic() > ends_at:
            raise TimeoutError(f"more than {_UPSTREAM_DEADLINE_S:g} s")
    return b"".join(chunks)


def _refuse(
    start_response: "StartResponse", status: HTTPStatus, reason: str
) -> Iterable[bytes]:
    body = f"{reason}\n".encode()
    start_response(
        f"{status.value} {status.phrase}", [_TEXT, ("Content-Length", str(len(body)))]
    )
    return [body]
