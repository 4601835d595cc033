"""Adds the name of an engine's start to the headers of its replies.

The router does not say which engine it chose. The gateway reads it from this header, and
the driver finds the same name in the engine's replies to its own questions.

The name is that of the engine and a random number: an engine that was started again has
another one.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

INSTANCE_HEADER = "x-invrl-engine"
NAME_VARIABLE = "INVRL_ENGINE_NAME"
"""Environment variable with the name of the engine."""


def add_instance_header() -> None:
    """Add the header. Call this in the engine's HTTP process before it serves. Imports
    SGLang."""
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(NamedReplies)


class NamedReplies:
    """An ASGI layer that adds the header. The server makes it when it starts, after a
    fork, so each engine has its own name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        instance = f"{os.environ.get(NAME_VARIABLE, 'engine')}.{secrets.token_hex(4)}"
        self._header = (INSTANCE_HEADER.encode(), instance.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), self._header]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_named)
