"""Before a run starts: the packages that its traces need are installed, and its settings for them fit
together."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from invrl.errors import ConfigError
from invrl.host.traces import lacks_sdk, traces_endpoint

if TYPE_CHECKING:
    from invrl.run.config import Config

_ENGINE_EXPORTER = "opentelemetry.exporter.otlp.proto.grpc"


def check_traces(config: Config) -> None:
    """Raises ConfigError."""
    setting = config.run.otel_endpoint
    if setting:
        _check_address(setting)
    if config.sglang.get("enable_trace") and not _has(_ENGINE_EXPORTER):
        reason = "SGLang sends its spans with opentelemetry-exporter-otlp-proto-grpc, which is not installed"
        fix = "pip install 'invrl[otel-engine]', or leave the option out: the engine's spans are missing then"
        raise ConfigError("sglang.enable_trace", config.sglang["enable_trace"], reason, fix)
    endpoint = traces_endpoint(setting)
    if not endpoint:
        return
    if lacks_sdk():
        reason = "opentelemetry-sdk or opentelemetry-exporter-otlp-proto-http is not installed"
        fix = "pip install 'invrl[otel]', or turn traces off (OTEL_SDK_DISABLED=true)"
        raise ConfigError("run.otel_endpoint", setting or endpoint, reason, fix)
    if config.router.get("enable_trace"):
        reason = "the router would replace the trace of the agent's call by its own"
        raise ConfigError("router.enable_trace", True, reason, "leave it out while traces are on")


def _check_address(address: str) -> None:
    parts = urlsplit(address)
    if "@" in parts.netloc:  # settings are written into the run folder
        fix = "leave it out; set OTEL_EXPORTER_OTLP_HEADERS in the environment"
        raise ConfigError("run.otel_endpoint", "(not shown)", "it holds a password", fix)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        fix = "give the address of OTLP over HTTP, such as http://127.0.0.1:4318"
        raise ConfigError("run.otel_endpoint", address, "it is no http:// or https:// address", fix)


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
