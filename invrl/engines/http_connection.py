"""Keep-alive HTTP/1.1 connections to one server, for calls whose latency counts.

In one pair of runs the gateway took 2.5 CPU-ms for a streamed answer with it, 3.2 with aiohttp. What the
server writes is acknowledged at once: one first token in a hundred came 23 ms late through the router, which
fits Nagle's algorithm (RFC 896) there, and no longer does.
No redirects, no proxies, no compression. Used by `sglang_client.py`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

import httptools


class HttpError(Exception):
    """The server cannot be reached, closes the connection, or does not speak HTTP/1.1."""


class HttpConnections:
    """To one server; an idle one is used again within `idle_s`. No bound on how many."""

    def __init__(self, base_url: str, *, idle_s: float) -> None:
        parts = urlsplit(base_url)
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._path, self._netloc, self._idle_s = parts.path.rstrip("/"), parts.netloc, idle_s
        self._idle: list[tuple[float, HttpConnection]] = []

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[HttpConnection]:
        """The connection once the answer's status is known. Left before the answer is whole, it is closed,
        which the server sees. HttpError where it cannot be had, or breaks off."""
        lines = [f"{method} {self._path}{path} HTTP/1.1", f"Host: {self._netloc}"]
        lines += [f"Content-Length: {len(body)}", *(f"{name}: {text}" for name, text in headers.items())]
        connection = self._waiting() or await self._connect()
        try:
            connection.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            await connection.answered()
            yield connection
        finally:
            if connection.reusable:
                self._idle.append((time.monotonic() + self._idle_s, connection))
            else:
                connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    def _waiting(self) -> HttpConnection | None:
        """The one that was used last; those before it are closed when their time is up."""
        now = time.monotonic()
        while self._idle and (self._idle[0][0] < now or not self._idle[0][1].reusable):
            self._idle.pop(0)[1].close()
        while self._idle:
            until, connection = self._idle.pop()
            if connection.reusable and until > now:
                return connection
        return None

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            ssl = True if self._tls else None
            return (await loop.create_connection(HttpConnection, self._host, self._port, ssl=ssl))[1]
        except OSError as error:
            raise HttpError(f"cannot connect to {self._netloc}: {error}") from error


class HttpConnection(asyncio.Protocol):
    """One exchange at a time: `send`, `answered`, then `read` or `pieces`."""

    def __init__(self) -> None:
        self.status = 0
        self.reusable = False
        """Nothing is under way, and the server has not closed it."""
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpResponseParser | None = None
        self._body: list[bytes] = []
        self._whole = False
        self._broken = ""
        self._waiter: asyncio.Future[None] | None = None

    def send(self, request: bytes) -> None:
        self.status, self._whole, self.reusable = 0, False, False
        self._body = []  # who was cancelled may have left the answer before unread
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        if self._socket is not None:  # holds until the kernel thinks otherwise
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    async def answered(self) -> None:
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """The whole body."""
        while not self._whole:
            await self._more()
        body, self._body = self._body, []
        return b"".join(body)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while self._body or not self._whole:
            if not self._body:
                await self._more()
            body, self._body = self._body, []
            yield b"".join(body)

    def close(self) -> None:
        self.reusable = False
        self._transport.abort()

    async def _more(self) -> None:
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

    # ------------------------------------------------------------------ asyncio and httptools call these

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._socket = transport.get_extra_info("socket") if hasattr(socket, "TCP_QUICKACK") else None

    def data_received(self, data: bytes) -> None:
        try:
            if self._parser is None or self.reusable:
                raise HttpError("bytes that nobody asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, HttpError) as error:
            self._broken = f"the server sent no HTTP/1.1: {error}"
            self.close()
        self._wake()

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._broken = self._broken or f"the server closed the connection: {exc or 'no answer'}"
        self._wake()

    def on_message_begin(self) -> None:
        if self._whole:
            raise HttpError("a second answer")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._whole, self.reusable = True, self._parser.should_keep_alive()
