"""The identity that an engine reports to a run that has not started it: `GET
/engine_identity`.

Invariant: the sampling key is new with each start of an external engine. The engine and
the run compute it from the engine's key, which both read from their environment, and
from the name of the start, which the engine reports. A router therefore cannot reach an
engine that was started again until the run has asked for the new name, which it does
only to bring the engine up to date.

Only the holder of the engine's key may ask, and the response holds no key.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Any

import msgspec
import orjson

from invrl import __version__

IDENTITY_PATH = "/engine_identity"
START_VARIABLE = "INVRL_ENGINE_START"
"""Environment variable of an engine with the name of this start."""


class EngineTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits that run and engine must agree on. None in a run's wish: any value is
    right."""

    invrl: str
    """Version of this package."""
    model_type: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: str
    tp_size: int
    weight_loaders: list[str]
    """Weight loaders by import path."""
    streams_new_tokens: bool
    shared_experts_fusion: bool
    overlap_schedule: bool | None
    routed_experts: bool | None
    seeded_sampling: bool


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    start: str
    """Name of this start of the engine."""
    total_tokens: int
    """Tokens that the KV cache holds."""
    traits: EngineTraits


def sampling_key(engine_key: str, start: str) -> str:
    """Return the key that samples, for this start of the engine."""
    return hmac.digest(engine_key.encode(), start.encode(), "sha256").hex()


def model_traits(model_path: Path) -> dict[str, Any]:
    """Return the fields of `EngineTraits` that the folder's config.json determines."""
    config = orjson.loads((model_path / "config.json").read_bytes())
    return {
        "model_type": str(config["model_type"]),
        "vocab_size": int(config["vocab_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "hidden_size": int(config["hidden_size"]),
    }


def add_identity_route() -> None:
    """Add the route. Call this in the engine's HTTP process before it serves. Imports
    SGLang."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.get(IDENTITY_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def engine_identity() -> Any:
        state = http_server._global_state
        assert state is not None, "a request comes after the start"
        settings = state.tokenizer_manager.server_args.resolved_dict()
        identity = EngineIdentity(
            start=os.environ.get(START_VARIABLE, ""),
            total_tokens=int(state.scheduler_info["max_total_num_tokens"]),
            traits=_resolved_traits(settings),
        )
        return msgspec.to_builtins(identity)


def _resolved_traits(settings: dict[str, Any]) -> EngineTraits:
    """`settings`: SGLang's resolved settings."""
    return EngineTraits(
        invrl=__version__,
        **model_traits(Path(settings["model_path"])),
        dtype=str(settings["dtype"]),
        tp_size=int(settings["tp_size"]),
        weight_loaders=list(settings["custom_weight_loader"] or ()),
        streams_new_tokens=bool(settings["incremental_streaming_output"]),
        shared_experts_fusion=not settings["disable_shared_experts_fusion"],
        overlap_schedule=not settings["disable_overlap_schedule"],
        routed_experts=bool(settings["enable_return_routed_experts"]),
        seeded_sampling=bool(settings["enable_deterministic_inference"]),
    )
