"""Routes of an engine's HTTP process that SGLang does not have.

`POST /drain_generation`: the engine finishes its running requests, and new ones wait.
SGLang can pause or abort running requests, but not let them finish. In the HTTP process
every running request holds a lock; `/continue_generation` lets the new ones start.

`POST /pause_and_flush` and `POST /name_weights`: steps of a weight update for which
SGLang has two requests each. Generation is paused during both.

`GET /loader_reply/NAME`: the reply of the weight loader inside the engine, for a run on
another machine. The loader (`weights/loader/weight_loader.py`) can reply only with a
file. A file with a bare name is in the engine's TMPDIR, which the HTTP process shares.
A reply is served once.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

DRAIN_PATH = "/drain_generation"
PAUSE_PATH = "/pause_and_flush"
NAME_PATH = "/name_weights"
REPLY_PATH = "/loader_reply"
REPLY_PREFIX = "invrl-reply-"
"""Prefix of the names of replies; nothing else is served."""
_POLL_INTERVAL_S = 0.02


def add_routes() -> None:
    """Add the routes. Call this in the engine's HTTP process before it serves. Imports
    SGLang."""
    from fastapi import HTTPException, Response
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.io_struct import (
        PauseGenerationReqInput,
        UpdateWeightVersionReqInput,
    )
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @app.post(DRAIN_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def drain_generation(timeout: float) -> dict[str, bool]:
        """Reply when no request runs any more, or after `timeout` seconds."""
        manager = tokenizer_manager()
        deadline = time.monotonic() + timeout
        async with manager.is_pause_cond:
            manager.is_pause = True
        while is_running := await manager.model_update_lock.is_locked():
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_INTERVAL_S)
        return {"drained": not is_running}

    @app.post(PAUSE_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pause_and_flush() -> dict[str, bool]:
        """Retract running requests, which continue after `/continue_generation`."""
        manager = tokenizer_manager()
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        flushed = await manager.flush_cache()
        if not flushed.success:
            raise HTTPException(400, flushed.message or "the cache is not flushed")
        return {"flushed": True}

    @app.post(NAME_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def name_weights(version: str) -> dict[str, str]:
        """Reply with the name that the engine then has for its weights. Running
        requests continue."""
        manager = tokenizer_manager()
        await manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )
        return {"weight_version": str(manager.config_value("weight_version"))}

    @app.get(REPLY_PATH + "/{name}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def loader_reply(name: str) -> Response:
        """Serve a reply. `name` has no slash: it is one part of the path."""
        path = Path(tempfile.gettempdir(), name)
        try:
            body = path.read_bytes() if name.startswith(REPLY_PREFIX) else None
        except OSError:
            body = None
        if body is None:
            return Response(status_code=404)
        path.unlink()
        return Response(body, media_type="application/json")


def tokenizer_manager() -> "TokenizerManager":
    """Return the object through which an engine's HTTP process serves, once it
    serves."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    state = http_server._global_state
    assert state is not None, "a request comes after the start"
    manager = state.tokenizer_manager
    assert isinstance(manager, TokenizerManager), "an engine has one HTTP process"
    return manager
