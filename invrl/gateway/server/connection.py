"""One HTTP exchange with an agent, close to the wire: did the client go away, did it get everything?

Invariant: an answer counts as delivered only if the client was still there after its last byte was
written. The body's end is sent apart from its last bytes, because from then on the server reports
every connection as gone. Used by `agent_api.py` and `forwarder.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from invrl.errors import SessionError

_EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class ClientConnection:
    """The request that came and the answer on its way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.gone = asyncio.Event()
        """The client has disconnected."""
        self.started = False
        """The answer's head has been sent: no other status can follow."""
        self.error_event: Callable[[SessionError], bytes] = lambda _: b""
        """How a stream that has begun tells an error."""
        self._watch: asyncio.Task[None] | None = None

    async def body(self, *, limit: int, deadline_s: float) -> bytes:
        """The whole body. SessionError 413 past `limit` bytes, 408 past the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                body = await self._read(limit)
        except TimeoutError:
            reason = f"the request's body was not complete after {deadline_s:.0f} s"
            raise SessionError(reason, status=408, code="timeout") from None
        self._watch = asyncio.create_task(self._watch_client())
        return body

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Sends a whole answer; True if the client was there to the end. The server goes on listening to a
        client whose body has not ended, so that the answer is not lost to a reset."""
        await self.start(status, {**headers, "content-length": str(len(body))})
        return await self.end(body)

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        await self.start(200, {**headers, **_EVENT_STREAM})

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> bool:
        """Sends the last bytes; True if the client was there to the end."""
        await self.write(data)
        delivered = not self.gone.is_set()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return delivered

    async def unless_gone(self, answering: Coroutine[Any, Any, bool]) -> bool:
        """Its result; False as soon as the client has disconnected, which cancels it. Runs in the caller's
        task: another one would cost two rounds of the event loop."""
        caller = asyncio.current_task()
        assert self._watch is not None, "the body has been read"
        assert caller is not None

        def leave(_: object) -> None:
            caller.cancel()

        self._watch.add_done_callback(leave)
        try:
            return await answering
        except asyncio.CancelledError:
            if not self.gone.is_set() or caller.uncancel():
                raise
            return False
        finally:
            self._watch.remove_done_callback(leave)

    def release(self) -> None:
        """The exchange is over. Without the reference its watch would be garbage that only the collector
        finds, with everything it has seen."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message: Message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                raise SessionError("the client went away", status=400, code="disconnected")
            body += message.get("body", b"")
            if len(body) > limit:
                reason = f"the request's body is larger than {limit} bytes"
                raise SessionError(reason, status=413, code="request_too_large")
            if not message.get("more_body"):
                return bytes(body)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()
