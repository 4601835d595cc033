"""The session API's requests: the key is checked before a byte of the body is read, and the body has a size
and a deadline, as on agents' routes."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message

from invrl.gateway.server.connection import ClientConnection


def bounded_route(*, authorize: Callable[[Request], None], limit: int, deadline_s: float) -> type[APIRoute]:
    """Routes that answer what `authorize` raises, which sees a request without its body; then 413 past
    `limit` bytes, 408 where a body is not whole after `deadline_s`."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                authorize(request)
                client = ClientConnection(request.scope, request.receive, request._send)

                async def rest() -> Message:
                    await client.gone.wait()
                    return {"type": "http.disconnect"}

                whole = Request(request.scope, rest)
                try:
                    whole._body = await client.body(limit=limit, deadline_s=deadline_s)
                    return await handle(whole)
                finally:
                    client.release()

            return bounded

    return BoundedRoute
