"""A collector of OpenTelemetry's spans that runs in the test's process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP on a port of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _TakeSpans)
        self.bodies: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def spans(self) -> list[Span]:
        return [span for _, span in self._sent]

    @property
    def _sent(self) -> list[tuple[str, Span]]:
        """With the name of the service that sent it."""
        return [
            (_service(resource), span)
            for body in list(self.bodies)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def spans_of(self, service: str) -> list[Span]:
        """Those that processes of this name sent."""
        return [span for name, span in self._sent if name == service]

    def chain(self, trace_id: str) -> dict[str, Span]:
        """The spans of a trace by name; each name must be there once."""
        spans = [span for span in self.spans if span.trace_id.hex() == trace_id]
        by_name = {span.name: span for span in spans}
        assert len(by_name) == len(spans)
        return by_name


class _TakeSpans(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        assert self.path == "/v1/traces"
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def _service(resource: ResourceSpans) -> str:
    names = [
        item.value.string_value
        for item in resource.resource.attributes
        if item.key == "service.name"
    ]
    return names[0] if names else ""


@contextmanager
def running_collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
