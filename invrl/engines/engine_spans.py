"""Lets SGLang send the spans of its requests to the collector of the run, by OTLP over
HTTP.

SGLang's own default is gRPC, and it imports that exporter whichever is used; a stand-in
spares the package. Invariant: an engine sends spans only below a span that the gateway
sends too, so health checks and canaries make none."""

import logging
import os
import sys
import types

FLAG = "--enable-trace"
_UNUSED_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"
_STAGES_ONLY = "1"
"""SGLang's level of the stages of a request: its queue, its prefill, its decode. Level
3 has the steps."""


def span_flags(endpoint: str) -> list[str]:
    """Flags for an engine that sends its spans there; none for "". `endpoint`: as
    `traces_endpoint` returns it."""
    if not endpoint:
        return []
    return [FLAG, "--otlp-traces-endpoint", endpoint]


def send_spans_over_http() -> None:
    """To be called in every process of an engine with these flags, before it imports
    SGLang."""
    exporter = types.ModuleType(_UNUSED_EXPORTER)
    vars(exporter)["OTLPSpanExporter"] = None
    sys.modules[_UNUSED_EXPORTER] = exporter
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    os.environ["OTEL_TRACES_SAMPLER"] = "parentbased_always_off"
    os.environ.setdefault("SGLANG_TRACE_LEVEL", _STAGES_ONLY)
    # Each batch that a dead collector does not take would be a traceback in the
    # engine's log.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
