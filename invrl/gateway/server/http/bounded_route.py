"""Routes of the session API that check the key before they read the body, and bound the
body's size and time.

The agents' routes have the same limits (`agent_api.py`).
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Scope

from invrl.gateway.dialects.json_text import check_encoding
from invrl.gateway.server.http.connection import ClientConnection


def bounded_route(
    *, authorize: Callable[[Request], None], limit: int, deadline_s: float
) -> type[APIRoute]:
    """Return a route class. Its routes first call `authorize` with a request whose body
    has not been read, and answer the error that it raises. Then they read the body: 413
    if it has more than `limit` bytes, 408 if it is not complete after `deadline_s`. A
    body is JSON, whatever its content type; no body is `{}`."""

    class BoundedRoute(APIRoute):
        def get_route_handler(
            self,
        ) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_bounded(request: Request) -> Response:
                authorize(request)
                client = ClientConnection(request.scope, request.receive, request._send)

                async def receive_after_body() -> Message:
                    await client.gone.wait()
                    return {"type": "http.disconnect"}

                request_with_body = Request(_as_json(request.scope), receive_after_body)
                try:
                    body = await client.body(limit=limit, deadline_s=deadline_s)
                    check_encoding(body)
                    request_with_body._body = body.strip() or b"{}"
                    return await handle(request_with_body)
                finally:
                    client.release()

            return handle_bounded

    return BoundedRoute


def _as_json(scope: Scope) -> Scope:
    """Return the request with the content type of JSON, which curl, for one, does not
    send by default."""
    headers = [
        (name, value) for name, value in scope["headers"] if name != b"content-type"
    ]
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}
