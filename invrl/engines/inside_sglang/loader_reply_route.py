"""`GET /loader_reply/NAME`: the reply of the weight loader inside an engine, for a run
on another machine.

The loader (`weights/loader/weight_loader.py`) can reply only with a file. A file with a
bare name is in the engine's TMPDIR, which the engine's HTTP process shares. A reply is
served once."""

import tempfile
from pathlib import Path

REPLY_PATH = "/loader_reply"
REPLY_PREFIX = "invrl-reply-"
"""Prefix of the names of replies; nothing else is served."""


def add_reply_route() -> None:
    """Add the route. Call this in the engine's HTTP process before it serves. Imports
    SGLang."""
    from fastapi import Response
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    @http_server.app.get(REPLY_PATH + "/{name}")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def loader_reply(name: str) -> Response:
        """Serve a reply. `name` has no slash: it is one part of the path."""
        if not name.startswith(REPLY_PREFIX):
            return Response(status_code=404)
        path = Path(tempfile.gettempdir(), name)
        try:
            body = path.read_bytes()
        except OSError:
            return Response(status_code=404)
        path.unlink()
        return Response(body, media_type="application/json")
