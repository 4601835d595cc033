"""Checks before a run starts that the packages for its traces are installed and its
trace settings are consistent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from invrl.errors import ConfigError
from invrl.host.output.traces import lacks_sdk, traces_endpoint

if TYPE_CHECKING:
    from invrl.run.settings.config import Config

_PROTOCOL = "http/protobuf"
_PROTOCOL_VARIABLES = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
)


def check_traces(config: Config) -> None:
    """Raise ConfigError for traces that cannot be sent."""
    setting = config.run.log.otel_endpoint
    endpoint = traces_endpoint(setting)
    if setting:
        _check_address("log.otel_endpoint", setting)
    elif endpoint:
        _check_address("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    if not endpoint:
        return
    _check_protocol()
    if lacks_sdk():
        reason = "opentelemetry-sdk or opentelemetry-exporter-otlp-proto-http is not installed"
        fix = "pip install 'invrl[otel]', or turn traces off (OTEL_SDK_DISABLED=true)"
        raise ConfigError("log.otel_endpoint", setting or endpoint, reason, fix)
    if config.router.get("enable_trace"):
        reason = "the router would replace the trace of the agent's call by its own"
        raise ConfigError(
            "router.enable_trace", True, reason, "leave it out while traces are on"
        )


def _check_address(field: str, address: str) -> None:
    if (
        "@" in address
    ):  # settings are written into the run folder, and an engine's flags are public
        fix = "leave it out; set OTEL_EXPORTER_OTLP_HEADERS in the environment"
        raise ConfigError(field, "(not shown)", "it holds a password", fix)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        fix = "give the address of OTLP over HTTP, such as http://127.0.0.1:4318"
        raise ConfigError(field, address, "it is no http:// or https:// address", fix)


def _check_protocol() -> None:
    """Check the protocol. The first variable that is set counts, as in OpenTelemetry's
    specification."""
    for name in _PROTOCOL_VARIABLES:
        protocol = os.environ.get(name, "")
        if protocol == _PROTOCOL:
            return
        if protocol:
            fix = f"set it to {_PROTOCOL}, and give the collector's port for HTTP (usually 4318)"
            raise ConfigError(
                name, protocol, "spans are sent by OTLP over HTTP, as protobuf", fix
            )
