"""uvicorn's HTTP protocol with limits on what a client may keep waiting, and one write to the socket for what
an answer writes in one go.

Head, events and end of an answer would each be a system call that wakes the client. A client that goes on
sending a body after its answer (413, 408) is listened to for a while, so that it can read it, then closed.
Invariants: a connection that sends no whole head in `head_timeout_s`, or a head without end, is closed; so is
one that sends neither head nor body (trailers, the length of a chunk) without end; so is one that does not
read its answer, whose handler then sees that the client is gone."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LINGER_S = 5.0
_MAX_UNREAD_BYTES = 65_536
"""Of one head, or of what is neither head nor body, after the first piece of it that the socket gave (256 KiB
at most)."""
_LEAST_BYTES_PER_S = 1000.0
"""A client that reads more slowly than this does not read."""
_HEAD_TOO_LARGE = "431 Request Header Fields Too Large"
_HEAD_TOO_SLOW = "408 Request Timeout"


class _Cork:
    """A transport whose writes leave together: when the answer is whole, when the event loop comes round, or
    when it is closed. What the client has not read `write_timeout_s` after that is thrown away."""

    def __init__(self, transport: asyncio.Transport, write_timeout_s: float) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._write_timeout_s = write_timeout_s
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def close(self) -> None:
        self.flush()
        if self._transport.is_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(self._write_timeout_s, self._transport.abort)

    def flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(b"".join(self._held))
        self._held.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CorkedHttpProtocol(HttpToolsProtocol):
    """With the limits of the class; `corked_http` makes a class with others."""

    head_timeout_s = 30.0
    """From the connection's beginning, or from the first byte of a later request, to the end of its head."""
    write_timeout_s = 30.0
    """Seconds in which a client that is behind must have read as much as `_LEAST_BYTES_PER_S` asks for."""

    _lingering: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _in_head = False
    """A head has begun and not ended."""
    _was_read = False
    """What the socket gave last held the beginning or the end of a head, or some of a body."""
    _unread_bytes = 0
    """Of all that came since then."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Cork(transport, self.write_timeout_s))  # type: ignore[arg-type]
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer, self._lingering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._was_read = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._unread_bytes = 0 if self._was_read else self._unread_bytes + len(data)
        if self._unread_bytes > _MAX_UNREAD_BYTES:
            if self._in_head:
                self._refuse(_HEAD_TOO_LARGE)
            else:
                self.transport.close()
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None and self._lingering is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._was_read = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers, which come behind a body, are dropped: nobody reads them, and they would be kept with the
        head."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._was_read = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._was_read = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._lingering = self.loop.call_later(_LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(_HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, status: str) -> None:
        """An answer to a request without a whole head, which no handler has seen."""
        head = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def _await_reader(self, unsent: int) -> None:
        """`unsent`: bytes that wait now."""
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if before - unsent < _LEAST_BYTES_PER_S * self.write_timeout_s:
            self.transport.abort()
        else:
            self._await_reader(unsent)


def corked_http(*, head_timeout_s: float, write_timeout_s: float) -> type[CorkedHttpProtocol]:
    """The protocol with these limits."""
    limits = {"head_timeout_s": head_timeout_s, "write_timeout_s": write_timeout_s}
    return type("LimitedHttpProtocol", (CorkedHttpProtocol,), limits)
