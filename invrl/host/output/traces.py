"""OpenTelemetry traces of a process. OpenTelemetry is imported only in a process that
sends them.

Spans go to a collector by OTLP over HTTP, in batches, from a separate thread.
Invariants: nobody waits for the collector. Spans that it does not accept are lost, as
are those that come while the queue is full. Spans have numbers and ids, never text of
prompts or replies, error messages, or keys.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Attributes = Mapping[str, str | int | float]
_QUEUE_SPANS = 16_384
_EXPORT_TIMEOUT_S = 5
_ENDPOINT_VARIABLES = (
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
)


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """A span by its ids, in hexadecimal digits, as another process refers to it."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        """Header of a request whose spans belong below this one. The trace is
        sampled."""
        return f"00-{self.trace_id}-{self.span_id}-01"


def traces_endpoint(setting: str | None) -> str:
    """Return the address to which this process sends spans; "" for none. `setting`: the
    collector's address, as `--log.otel-endpoint` has it. Without it the standard
    environment variables count."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if setting:
        address = setting.rstrip("/")
        return address if address.endswith("/v1/traces") else f"{address}/v1/traces"
    by_variable = [os.environ.get(name, "") for name in _ENDPOINT_VARIABLES]
    if by_variable[0] or not by_variable[1]:
        return by_variable[0]
    return by_variable[1].rstrip("/") + "/v1/traces"


def lacks_sdk() -> bool:
    """Whether the packages that send spans are missing."""
    for name in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"):
        try:
            if importlib.util.find_spec(name) is None:
                return True
        except ModuleNotFoundError:
            return True
    return False


class Traces:
    """Makes the spans of this process. A process that forks makes it in the child: it
    has a thread."""

    def __init__(self, endpoint: str, *, service: str, run: str) -> None:
        """`endpoint`: as `traces_endpoint` returns it. `service`: the process's name in
        traces."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # Each batch that a dead collector does not take would be a line of the log.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        resource = Resource.create({"service.name": service, "invrl.run": run})
        self._provider: TracerProvider = TracerProvider(
            resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS)
        )
        self._tracer: Tracer = self._provider.get_tracer("invrl")

    @contextlib.contextmanager
    def call(
        self, name: str, traceparent: str, attributes: Attributes
    ) -> Iterator[None]:
        """Make a span around a request with this `traceparent` header: it continues
        that trace, or begins a new one if the header is missing or malformed.
        `child_span` makes spans below it."""
        span = self._tracer.start_span(
            name, _remote_context(traceparent), attributes=dict(attributes)
        )
        with _current(self._tracer, span):
            yield

    def past_span(
        self,
        name: str,
        parent: SpanPlace | None,
        *,
        start: float,
        end: float,
        attributes: Attributes,
    ) -> SpanPlace:
        """Make a span of something that has ended, below another span, which may be of
        another process. Without `parent` it begins a trace. `start`, `end`: Unix
        seconds."""
        context = _remote_context("" if parent is None else parent.traceparent)
        span = self._tracer.start_span(
            name, context, attributes=dict(attributes), start_time=_ns(start)
        )
        span.end(_ns(end))
        return _place(span)

    def close(self, *, deadline_s: float = 3.0) -> None:
        """Send the remaining spans, for at most `deadline_s`."""
        closing = threading.Thread(
            target=self._provider.shutdown, name="close-traces", daemon=True
        )
        closing.start()
        closing.join(deadline_s)


def open_traces(setting: str, *, service: str, run: str) -> Traces | None:
    """Open the traces; None if no endpoint is set."""
    endpoint = traces_endpoint(setting)
    if not endpoint:
        return None
    return Traces(endpoint, service=service, run=run)


_Current = tuple["Tracer", "Span"]
_current_span: ContextVar[_Current | None] = ContextVar("current_span", default=None)
"""Current span of this task and its child tasks."""


@contextlib.contextmanager
def child_span(
    name: str, attributes: Attributes | None = None
) -> Iterator[SpanPlace | None]:
    """Make a span below the current one, which is current inside of the block; None if
    there is no current one, or if its trace is not sampled."""
    current = _current_span.get()
    if current is None:
        yield None
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    tracer, parent = current
    context = set_span_in_context(parent, Context())
    span = tracer.start_span(name, context, attributes=dict(attributes or {}))
    with _current(tracer, span):
        yield _place(span) if span.is_recording() else None


def current_traceparent() -> str:
    """Return the header for the requests of this task; "" if there is no current
    span."""
    current = _current_span.get()
    if current is None:
        return ""
    context = current[1].get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


@contextlib.contextmanager
def _current(tracer: Tracer, span: Span) -> Iterator[None]:
    """End the span with the block. Only the type of an exception is kept: its message
    may quote a prompt."""
    from opentelemetry.trace import Status, StatusCode

    token = _current_span.set((tracer, span))
    try:
        yield
    except BaseException as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        _current_span.reset(token)
        span.end()


def _remote_context(traceparent: str) -> Context:
    """Return OpenTelemetry's context below the span that a header names; an empty one
    if it names none. It is never the caller's context, in which other libraries may
    have a span."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    header = {"traceparent": traceparent}
    return TraceContextTextMapPropagator().extract(header, Context())


def _place(span: Span) -> SpanPlace:
    context = span.get_span_context()
    return SpanPlace(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
