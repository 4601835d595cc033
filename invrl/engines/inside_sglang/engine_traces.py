"""Sends the spans of SGLang's requests to the run's collector, by OTLP over HTTP.

SGLang's default is gRPC, and it always imports that exporter; a stand-in avoids the
dependency. Invariant: an engine sends spans only below a span that the gateway sends
too, so health checks and canaries make none.
"""

import logging
import os
import sys
import types

FLAG = "--enable-trace"
_UNUSED_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_STAGES_ONLY = "1"
"""SGLang's trace level for the stages of a request: queue, prefill, decode. Level 3
adds the steps."""


def span_flags(endpoint: str) -> list[str]:
    """Return the flags of an engine that sends its spans to `endpoint` (from
    `traces_endpoint`); none for ""."""
    if not endpoint:
        return []
    return [FLAG, "--otlp-traces-endpoint", endpoint]


def send_spans_over_http() -> None:
    """Set the exporter up. Call this in every process of an engine with these flags,
    before it imports SGLang."""
    exporter = types.ModuleType(_UNUSED_EXPORTER)
    vars(exporter)["OTLPSpanExporter"] = None
    sys.modules[_UNUSED_EXPORTER] = exporter
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_always_off"
    os.environ.setdefault("SGLANG_TRACE_LEVEL", _STAGES_ONLY)
    # Otherwise a dead collector adds a traceback per batch to the engine's log.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
