"""The session API's request bodies have a size and a deadline. The agents' routes read theirs themselves
(`connection.py`). Made by `app.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive


def bounded_route(*, limit: int, deadline_s: float) -> type[APIRoute]:
    """Routes that answer 413 past `limit` bytes, 408 where a body is not whole after `deadline_s`."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                return await handle(Request(request.scope, _bounded(request.receive, limit, deadline_s)))

            return bounded

    return BoundedRoute


def _bounded(receive: Receive, limit: int, deadline_s: float) -> Receive:
    end, size, whole = asyncio.get_running_loop().time() + deadline_s, 0, False

    async def receive_bounded() -> Message:
        nonlocal size, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            reason = f"the request's body was not complete after {deadline_s:.0f} s"
            raise HTTPException(408, reason) from None
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413, f"the request's body is larger than {limit} bytes")
        whole = not message.get("more_body")
        return message

    return receive_bounded
