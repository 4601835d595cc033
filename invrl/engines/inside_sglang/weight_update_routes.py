"""`POST /pause_and_flush` and `POST /name_weights`: steps of a weight update that take
SGLang two requests each.

Generation is paused while they are answered. The routes are of the engine's HTTP
process.
"""

from invrl.engines.inside_sglang.drain_route import tokenizer_manager

PAUSE_PATH = "/pause_and_flush"
NAME_PATH = "/name_weights"


def add_update_routes() -> None:
    """Add the routes, in the engine's HTTP process before it serves. Imports SGLang."""
    from fastapi import HTTPException
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import (
        PauseGenerationReqInput,
        UpdateWeightVersionReqInput,
    )
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.post(PAUSE_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def pause_and_flush() -> dict[str, bool]:
        """Running requests are retracted, and go on after `/continue_generation`."""
        manager = tokenizer_manager()
        await manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        flushed = await manager.flush_cache()
        if not flushed.success:
            raise HTTPException(400, flushed.message or "the cache is not flushed")
        return {"flushed": True}

    @http_server.app.post(NAME_PATH)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def name_weights(version: str) -> dict[str, str]:
        """Running requests go on. Answers with the name that the engine then has for
        its weights."""
        manager = tokenizer_manager()
        await manager.update_weight_version(
            UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        )
        return {"weight_version": str(manager.config_value("weight_version"))}
