"""uvicorn's HTTP protocol with limits on how long a client may keep a connection
waiting, and with the writes of one answer combined into one write to the socket.

Without that, the head, the events and the end of an answer would each be a system call
that wakes the client. A client that still sends its body after the answer (413, 408)
has some seconds to read it; then the connection is closed. A request to change the
protocol is ignored, as HTTP allows: the JDK's client asks for HTTP/2 with its first
request, whose body the parser would take for the other protocol's.
Invariants: a connection is closed if it does not send a whole head within
`head_timeout_s`, if its head grows without end, or if it sends data without end that is
neither head nor body (trailers, the length of a chunk). It is aborted if the client
does not read its answer; the handler then sees a disconnected client. The path of a
request begins with "/": its line names a path, or a whole URL whose path alone is
used.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LINGER_S = 5.0
"""Time during which a client may continue to send a body whose request has been
answered."""
_MAX_UNREAD_BYTES = 65_536
"""Limit for a head, and for data that is neither head nor body. The first piece of it
that the socket returned (256 KiB at most) is not counted."""
_LEAST_BYTES_PER_S = 1000.0
"""A client that reads more slowly counts as one that does not read."""
_HEAD_TOO_LARGE = "431 Request Header Fields Too Large"
_HEAD_TOO_SLOW = "408 Request Timeout"
_TARGET_BEGINNINGS = (b"/", b"http://", b"https://")
"""Valid beginnings of the target in a request line (RFC 9112, 3.2.1 and 3.2.2)."""


class _CoalescingTransport:
    """A transport that collects writes and sends them together: when the answer is
    complete, in the next round of the event loop, or when it is closed. Data that the
    client has not read `write_timeout_s` after the close is discarded."""

    def __init__(self, transport: asyncio.Transport, write_timeout_s: float) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._write_timeout_s = write_timeout_s
        self._pending: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(data)

    def close(self) -> None:
        self.flush()
        if self._transport.is_closing():
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(self._write_timeout_s, self._transport.abort)

    def flush(self) -> None:
        if self._pending and not self._transport.is_closing():
            self._transport.write(b"".join(self._pending))
        self._pending.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _OneProtocolParser(httptools.HttpRequestParser):
    """A parser that reads a request with an `Upgrade` header like one without it.
    (httptools stops after such a head. It gets the head a second time.)"""

    def __init__(self, protocol: "LimitedHttpProtocol") -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            [head_end] = upgrade.args
            super().feed_data(self._protocol.head_without_upgrade())
            if head_end < len(data):
                self.feed_data(data[head_end:])


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol with timeouts. They are class attributes, because uvicorn
    constructs the protocol; `limited_http_protocol` returns a subclass with other
    values."""

    head_timeout_s = 30.0
    """Time from the start of the connection, or from the first byte of a later request,
    to the end of its head."""
    write_timeout_s = 30.0
    """Interval over which a client that is behind must read `_LEAST_BYTES_PER_S` on
    average."""

    _linger_timer: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_upgrade = False
    """Whether the head read last asks for another protocol. It is read a second
    time."""
    _in_head = False
    """Whether a head has begun and has not ended."""
    _parser_advanced = False
    """Whether the data received last contained the start or the end of a head, or a
    part of a body."""
    _unread_bytes = 0
    """Bytes received since the parser last advanced."""

    def connection_made(self, transport: Any) -> None:
        self.parser = _OneProtocolParser(self)
        # as uvicorn's own
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        coalescing = _CoalescingTransport(transport, self.write_timeout_s)
        super().connection_made(coalescing)  # type: ignore[arg-type]
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._parser_advanced = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._parser_advanced:
            self._unread_bytes = 0
        else:
            self._unread_bytes += len(data)
        if self._unread_bytes > _MAX_UNREAD_BYTES:
            if self._in_head:
                self._refuse(_HEAD_TOO_LARGE)
            else:
                self.transport.close()
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self._head_timer is None and self._linger_timer is None:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._parser_advanced = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Drop trailers, which follow a body: nothing reads them, and uvicorn would
        store them with the headers."""
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._parser_advanced = True
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Check the head. An exception here is answered with 400, like every line that
        the parser refuses."""
        if not self.url.lower().startswith(_TARGET_BEGINNINGS):
            raise ValueError(
                "the target of the request line is neither a path nor a URL"
            )
        self._in_head = False
        self._parser_advanced = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        has_upgrade = any(name == b"upgrade" for name, _ in self.headers)
        self._is_upgrade = has_upgrade and self.parser.should_upgrade()
        if not self._is_upgrade:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        super().on_message_complete()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def head_without_upgrade(self) -> bytes:
        """Return the head read last, without its `Upgrade` header."""
        method = self.parser.get_method()
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(
            self.head_timeout_s, self._on_head_timeout
        )

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(_HEAD_TOO_SLOW)
        else:
            self.transport.close()

    def _refuse(self, status: str) -> None:
        """Answer a request whose head is not complete, so that no handler has seen
        it."""
        head = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode())
        self.transport.close()

    def _start_write_timer(self, unsent_bytes: int) -> None:
        """Start the timer. `unsent_bytes` is the present size of the write buffer."""
        self._write_timer = self.loop.call_later(
            self.write_timeout_s, self._check_reader, unsent_bytes
        )

    def _check_reader(self, unsent_bytes_before: int) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        bytes_read = unsent_bytes_before - unsent_bytes
        if bytes_read < _LEAST_BYTES_PER_S * self.write_timeout_s:
            self.transport.abort()
        else:
            self._start_write_timer(unsent_bytes)


def limited_http_protocol(
    *, head_timeout_s: float, write_timeout_s: float
) -> type[LimitedHttpProtocol]:
    """Return a protocol class with these timeouts."""
    timeouts = {"head_timeout_s": head_timeout_s, "write_timeout_s": write_timeout_s}
    return type("ConfiguredHttpProtocol", (LimitedHttpProtocol,), timeouts)
