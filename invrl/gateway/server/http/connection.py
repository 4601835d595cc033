"""One HTTP exchange with a client, at the level of ASGI messages: whether the client
has disconnected, and whether it received the whole answer.

Invariant: an answer counts as delivered only if the client was still connected after
the last byte had been written. The end of the body is sent as a separate message after
the last bytes: once it is sent, the server reports every connection as disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from invrl.errors import SessionError
from invrl.gateway.server.http.content_encoding import decompress

_EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
}


class ClientConnection:
    """A request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        self.model_in_path: str | None = scope.get("path_params", {}).get("model")
        """Model that the path names, as Google's API does; None if it names none."""
        self.query = scope["query_string"].decode("latin-1")
        self.gone = asyncio.Event()
        """Set when the client has disconnected."""
        self.session_id = ""
        """Session of the request, once its key is known. Every answer then names it."""
        self.started = False
        """Whether the head of the answer has been sent: its status can no longer be
        changed."""
        self.error_event: Callable[[SessionError], bytes] | None = None
        """Formats an error for a stream that has begun; None for other answers."""
        self._disconnect_watch: asyncio.Task[None] | None = None

    async def body(self, *, limit: int, deadline_s: float) -> bytes:
        """Read the whole body, and decompress it. Raises SessionError 413 if it has
        more than `limit` bytes, 408 past the deadline, 400 or 415 if it cannot be
        decompressed."""
        return await self.decompressed(
            await self.sent_body(limit=limit, deadline_s=deadline_s), limit=limit
        )

    async def decompressed(self, body: bytes, *, limit: int) -> bytes:
        """Return the body without its content encoding. Raises SessionError like
        `body`. A thread does the work: a few kilobytes may be as many megabytes as the
        limit allows."""
        encoding = self.headers.get("content-encoding", "")
        if not encoding:
            return body
        return await asyncio.to_thread(decompress, body, encoding, limit=limit)

    async def sent_body(self, *, limit: int, deadline_s: float) -> bytes:
        """Read the whole body as it was sent. Raises SessionError 413, 408 like
        `body`."""
        try:
            async with asyncio.timeout(deadline_s):
                body = await self._read_body(limit)
        except TimeoutError:
            reason = f"the request's body was not complete after {deadline_s:.0f} s"
            raise SessionError(reason, status=408, code="timeout") from None
        self._disconnect_watch = asyncio.create_task(self._watch_for_disconnect())
        return body

    async def answer(
        self, status: int, headers: Mapping[str, str], body: bytes
    ) -> bool:
        """Send a whole answer. True if the client was connected to the end. If the
        client has not finished its own body, the server continues to read it, so that
        the answer is not lost to a reset connection."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        return await self.end(body)

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        await self.start(200, {**headers, **_EVENT_STREAM})

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        if self.session_id:
            headers = {**headers, "x-invrl-session": self.session_id}
        raw_headers = [
            (name.encode("latin-1"), value.encode("latin-1"))
            for name, value in headers.items()
        ]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": raw_headers}
        )

    async def write(self, data: bytes) -> None:
        await self._send(
            {"type": "http.response.body", "body": data, "more_body": True}
        )

    async def end(self, data: bytes) -> bool:
        """Send the last bytes. True if the client was connected to the end."""
        await self.write(data)
        delivered = not self.gone.is_set()
        await self._send(
            {"type": "http.response.body", "body": b"", "more_body": False}
        )
        return delivered

    async def cancel_on_disconnect(self, answering: Coroutine[Any, Any, bool]) -> bool:
        """Return the result of `answering`. If the client disconnects, cancel it and
        return False. It runs in the task of the caller: another task would cost two
        rounds of the event loop."""
        caller = asyncio.current_task()
        assert self._disconnect_watch is not None, "the body has been read"
        assert caller is not None

        def cancel_caller(_: object) -> None:
            caller.cancel()

        self._disconnect_watch.add_done_callback(cancel_caller)
        try:
            return await answering
        except asyncio.CancelledError:
            if not self.gone.is_set() or caller.uncancel():
                raise
            return False
        finally:
            self._disconnect_watch.remove_done_callback(cancel_caller)

    def release(self) -> None:
        """End the exchange. If the connection kept its task, the two would be a
        reference cycle that only the garbage collector frees, with everything that they
        refer to."""
        if self._disconnect_watch is not None:
            self._disconnect_watch.cancel()
            self._disconnect_watch = None

    async def _read_body(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                raise SessionError(
                    "the client went away", status=400, code="disconnected"
                )
            body += message.get("body", b"")
            if len(body) > limit:
                reason = f"the request's body is larger than {limit} bytes"
                raise SessionError(reason, status=413, code="request_too_large")
            if not message.get("more_body"):
                return bytes(body)

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()
