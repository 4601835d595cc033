"""`POST /drain_generation`: an engine finishes its running requests, and new ones wait.

SGLang can pause or abort running requests, but not let them finish. The route lives in
the engine's HTTP process, where every running request holds a lock;
`/continue_generation` lets the new ones start.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

DRAIN_PATH = "/drain_generation"
_POLL_INTERVAL_S = 0.02


def add_drain_route() -> None:
    """Add the route. Call this in the engine's HTTP process before it serves. Imports
    SGLang."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.post(DRAIN_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def drain_generation(timeout: float) -> dict[str, bool]:
        """Answer when no request runs any more, or after `timeout` seconds."""
        manager = tokenizer_manager()
        deadline = time.monotonic() + timeout
        async with manager.is_pause_cond:
            manager.is_pause = True
        while is_running := await manager.model_update_lock.is_locked():
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_INTERVAL_S)
        return {"drained": not is_running}


def tokenizer_manager() -> TokenizerManager:
    """What an engine's HTTP process serves with, once it serves."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    state = http_server._global_state
    assert state is not None, "a request comes after the start"
    manager = state.tokenizer_manager
    assert isinstance(manager, TokenizerManager), "an engine has one HTTP process"
    return manager
