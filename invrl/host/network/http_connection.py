"""Keep-alive HTTP/1.1 connections to one server, for calls with low latency.

Its reason is the cost of a stream: one of 64 events took the client 1.4 CPU-ms, aiohttp
2.1 and httpx 8 to 9 (November 2026), and a gateway spends 2.5 on a whole streamed
reply. Data is acknowledged immediately: before, one first token in a hundred came 23 ms
late through the router, because of Nagle's algorithm (RFC 896).

No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import httptools

_MAX_UNREAD_BYTES = 262144
"""Of a body whose reader is slower than its server: the connection then waits."""


class HttpError(Exception):
    """The server cannot be reached, closes the connection, or does not speak
    HTTP/1.1."""


class NoConnectionError(HttpError):
    """The server cannot be reached: it has not received the request."""


class HttpConnections:
    """Connections to one server, without a bound on their number.

    A connection is reused if it has been idle for less than `idle_s`. A new one must be
    established within `connect_s`.
    """

    def __init__(
        self, base_url: str, *, idle_s: float, connect_s: float | None = None
    ) -> None:
        parts = urlsplit(base_url)
        self._tls = parts.scheme == "https"
        default_port = 443 if self._tls else 80
        self._host = parts.hostname or ""
        self._port = parts.port or default_port
        self._path = parts.path.rstrip("/")
        self._netloc = parts.netloc
        self._idle_s = idle_s
        self._connect_s = connect_s
        self._idle: list[tuple[float, HttpConnection]] = []
        """(closing time, connection), the oldest first."""

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[HttpConnection]:
        """Yield the connection once the response's status is known.

        A connection whose response has not been read to the end of the block is closed,
        which the server notices. `headers`: without Content-Length; `host`, in lower
        case, replaces the server's own name. Raises HttpError if there is no
        connection, or if it breaks.
        """
        lines = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Content-Length: {len(body)}",
        ]
        if "host" not in headers:
            lines.insert(1, f"Host: {self._netloc}")
        for name, value in headers.items():
            lines.append(f"{name}: {value}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        connection = self._take_idle() or await self._connect()
        try:
            connection.send(head + body, has_body=method != "HEAD")
            await connection.answered()
            yield connection
        finally:
            if connection.reusable:
                self._idle.append((time.monotonic() + self._idle_s, connection))
            else:
                connection.close()

    def close(self) -> None:
        while self._idle:
            _, connection = self._idle.pop()
            connection.close()

    def _take_idle(self) -> HttpConnection | None:
        """Return the connection that was used last. Expired ones, at the front, are
        closed."""
        now = time.monotonic()
        while self._idle:
            close_at, connection = self._idle[0]
            if close_at >= now and connection.reusable:
                break
            self._idle.pop(0)
            connection.close()
        while self._idle:
            close_at, connection = self._idle.pop()
            if connection.reusable and close_at > now:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        ssl = True if self._tls else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    HttpConnection, self._host, self._port, ssl=ssl
                )
        except OSError as error:
            reason = f"cannot connect to {self._netloc}: {error}"
            raise NoConnectionError(reason) from error
        return connection


class HttpConnection(asyncio.Protocol):
    """A connection. One exchange at a time: `send`, `answered`, then `read` or
    `pieces`."""

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        """Whether no exchange is in progress and the server has not closed the
        connection."""
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._has_body = True
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._is_paused = False
        """Whether the transport waits until the body is taken."""
        self._whole = False
        """Whether the whole response has arrived."""
        self._broken = ""
        """Reason that no more can arrive."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response, with names in lower case. Of a repeated one, the
        last."""
        return {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in self._headers
        }

    def send(self, request: bytes, *, has_body: bool = True) -> None:
        """`has_body`: the response may have one, as to every method but HEAD."""
        self.status = 0
        self._headers = []
        self._has_body = has_body
        self._whole = False
        self.reusable = False
        self._take_body()  # left over if a caller was cancelled
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        if (
            self._socket is not None
        ):  # the kernel may turn it off again, so set it each time
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    async def answered(self) -> None:
        """Wait until the status is known."""
        while not self.status:
            await self._wait_for_more()

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives."""
        while self._body or not self._whole:
            if not self._body:
                await self._wait_for_more()
            yield self._take_body()

    def close(self) -> None:
        self.reusable = False
        self._transport.abort()

    def _take_body(self) -> bytes:
        """Return the data since the last call."""
        body = b"".join(self._body)
        self._body = []
        self._body_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    async def _wait_for_more(self) -> None:
        if self._broken:
            raise HttpError(self._broken)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------ asyncio and httptools call these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        has_quickack = hasattr(socket, "TCP_QUICKACK")
        self._socket = transport.get_extra_info("socket") if has_quickack else None

    def data_received(self, data: bytes) -> None:
        try:
            if self._parser is None or self.reusable:
                raise HttpError("bytes that answer no request")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, HttpError) as error:
            self._broken = f"the server sent no HTTP/1.1: {error}"
            self.close()
        self._wake()

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if not self._broken:
            self._broken = f"the server closed the connection: {exc or 'no answer'}"
        self._wake()

    def on_message_begin(self) -> None:
        if self._whole:
            raise HttpError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if not self._has_body:
            # The parser waits for a body of the length that the header names, so this
            # connection is not reused.
            self._whole = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > _MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._whole = True
        self.reusable = self._has_body and self._parser.should_keep_alive()
