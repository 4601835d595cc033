"""What an answer writes in one go leaves in one write; nothing is lost, or written to a
closed connection. A client that sends no whole head, or does not read its answer, is
not waited for."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from invrl.gateway.server.http.http_protocol import (
    LimitedHttpProtocol,
    _CoalescingTransport,
    limited_http_protocol,
)


class Wire:
    """The transport below."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> str:
        return name


async def test_writes_of_one_event_loop_turn_are_sent_together():
    wire = Wire()
    transport = _CoalescingTransport(wire, 30.0)  # type: ignore[arg-type]
    transport.write(b"head ")
    transport.write(b"body")
    assert wire.written == []
    await asyncio.sleep(0)
    assert wire.written == [b"head body"]
    transport.write(b"more")
    await asyncio.sleep(0)
    assert wire.written == [b"head body", b"more"]
    assert transport.get_extra_info("peername") == "peername"


async def test_closing_sends_held_bytes_first():
    wire = Wire()
    transport = _CoalescingTransport(wire, 30.0)  # type: ignore[arg-type]
    transport.write(b"last")
    transport.close()
    assert wire.written == [b"last"]
    assert wire.closed is True
    transport.write(b"too late")
    await asyncio.sleep(0)
    assert wire.written == [b"last"]


class Server:
    """The protocol over real sockets, around an application that each test gives."""

    def __init__(self, app: ASGIApp, **limits: float) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        protocol = limited_http_protocol(
            **{"head_timeout_s": 300.0, "write_timeout_s": 300.0, **limits}
        )
        config = uvicorn.Config(
            app, log_level="critical", http=protocol, timeout_keep_alive=300
        )
        self._server = uvicorn.Server(config)

    @property
    def protocols(self) -> list[LimitedHttpProtocol]:
        """Of the open connections."""
        return [
            connection
            for connection in self._server.server_state.connections
            if isinstance(connection, LimitedHttpProtocol)
        ]

    async def __aenter__(self) -> Server:
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        async with asyncio.timeout(60):
            while not self._server.started:
                await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-length", b"2")],
        }
    )
    await send({"type": "http.response.body", "body": b"ok"})


async def answer_to(server: Server, *pieces: bytes) -> bytes:
    """All that a connection is sent until the server closes it."""
    reader, writer = await asyncio.open_connection(*server.address)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(60):
            return await reader.read(-1)
    return b""


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (b"POST / HTTP/1.1\r\nhost: x\r\n", b"HTTP/1.1 408 "),
        (HEAD + b"abc" + b"GET / HT", b"HTTP/1.1 408 "),
        (HEAD + b"abc" + b"\r\n", b""),
    ],
    ids=[
        "silent",
        "an empty line",
        "a head's beginning",
        "a later head's beginning",
        "a later empty line",
    ],
)
async def test_connection_without_a_complete_head_is_closed(
    sent: bytes, answered: bytes
):
    async with Server(fine, head_timeout_s=0.3) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        async with asyncio.timeout(60):
            if sent.startswith(HEAD):
                writer.write(HEAD + b"abc")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
                sent = sent[len(HEAD) + 3 :]
            writer.write(sent)
            assert (await reader.read(-1))[: len(answered)] == answered


async def test_body_may_take_longer_than_the_head_timeout():
    arrived = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        arrived.set()
        await fine(scope, receive, send)

    async with Server(app) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        async with asyncio.timeout(60):
            for _ in range(3):
                arrived.clear()
                writer.write(HEAD + b"a")
                await arrived.wait()
                [protocol] = server.protocols
                assert protocol._head_timer is None
                writer.write(b"bc")
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
async def test_endless_head_is_refused(line: bytes):
    async with Server(fine) as server:
        pieces = [b"GET / HTTP/1.1\r\nhost: x\r\nz: ", *[line * 10] * 1000]
        answer = await answer_to(server, *pieces)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")


CHUNKED = (
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
)


@pytest.mark.parametrize(
    ("begin", "line"),
    [
        (b"0\r\n", b"x: y\r\n"),
        (b"0\r\nx: ", b"yyyyyy"),
        (b"1;x=", b"yyyyyy"),
    ],
    ids=["trailers", "one trailer", "the length of a chunk"],
)
async def test_endless_chunk_headers_and_trailers_close_the_connection(
    begin: bytes, line: bytes
):
    """The handler has not answered: nothing else closes the connection, and nobody has
    seen a key."""
    heads: list[list[tuple[bytes, bytes]]] = []

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            heads.append(scope["headers"])
            while (await receive())["type"] != "http.disconnect":
                pass

    async with Server(waiting) as server:
        await answer_to(server, CHUNKED + begin, *[line * 10_000] * 200)
        [head] = heads
        assert [name for name, _ in head] == [b"host", b"transfer-encoding"]


async def test_body_in_small_chunks_is_read_completely():
    """More bytes around the body than in it."""
    chunks = [b"1\r\na\r\n" * 10_000] * 20
    async with Server(fine) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        async with asyncio.timeout(60):
            for piece in (CHUNKED, *chunks, b"0\r\nx: y\r\n\r\n"):
                writer.write(piece)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


async def test_large_body_in_one_piece_does_not_count_as_a_head():
    async with Server(fine) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        async with asyncio.timeout(60):
            for _ in range(4):
                body = b"b" * 600_000
                writer.write(
                    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 600000\r\n\r\n"
                    + body
                )
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")


class Flood:
    """An answer without end; `ended` when its handler has seen that the client is
    gone."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watching = asyncio.create_task(self._watch(receive))
        while not watching.done():
            await send(
                {"type": "http.response.body", "body": b"x" * 65_536, "more_body": True}
            )
            self.sent += 65_536
            await asyncio.sleep(0)
        self.ended.set()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def test_handler_ends_if_its_client_stops_reading():
    flood = Flood()
    async with Server(flood, write_timeout_s=0.3) as server:
        client = socket.create_connection(server.address)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            await flood.ended.wait()
        client.close()


async def test_slow_reading_client_is_served():
    flood = Flood()
    async with Server(flood) as server:
        client = socket.create_connection(server.address)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(60):
            while not (server.protocols and server.protocols[0]._write_timer):
                await asyncio.sleep(0.01)
            [protocol] = server.protocols
            unsent = protocol.transport.get_write_buffer_size()
            enough = round(protocol.write_timeout_s * 1000)
            protocol._check_reader(unsent + enough)
            assert not protocol.transport.is_closing()
            protocol._check_reader(unsent + enough - 1)
            await flood.ended.wait()
        client.close()


async def test_bytes_unread_by_a_closing_client_are_discarded_after_a_timeout():
    aborted = asyncio.Event()

    class Full(Wire):
        def get_write_buffer_size(self) -> int:
            return 1

        def abort(self) -> None:
            aborted.set()

    transport = _CoalescingTransport(Full(), 0.01)  # type: ignore[arg-type]
    transport.write(b"never read")
    transport.close()
    async with asyncio.timeout(60):
        await aborted.wait()


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest.mark.parametrize(
    "size", [1, 7, 10_000], ids=["byte by byte", "in pieces", "at once"]
)
async def test_a_request_that_offers_another_protocol_is_read_with_its_body(size: int):
    """As the JDK's HTTP client sends it. A WebSocket is no more than a request
    either."""
    received: list[tuple[str, bytes, list[bytes]]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        received.append((scope["path"], body, [name for name, _ in scope["headers"]]))
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"2")],
            }
        )
        await send({"type": "http.response.body", "body": b"ok"})

    requests = [
        b"POST /a?x=1 HTTP/1.1\r\nhost: x\r\n"
        + UPGRADE
        + b"content-length: 5\r\n\r\nhello",
        CHUNKED.replace(b"POST / HTTP/1.1\r\n", b"POST /b HTTP/1.1\r\n" + UPGRADE)
        + b"0\r\n\r\n",
        b"GET /c HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"POST /d HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbye",
    ]
    sent = b"".join(requests)
    pieces = [sent[begin : begin + size] for begin in range(0, len(sent), size)]
    async with Server(app) as server:
        answers = await answer_to(server, *pieces)
    assert answers.count(b"HTTP/1.1 200 OK") == len(requests)
    assert [(path, body) for path, body, _ in received] == [
        ("/a", b"hello"),
        ("/b", b"abc"),
        ("/c", b""),
        ("/d", b"bye"),
    ]
    assert received[0][2] == [
        b"host",
        b"connection",
        b"http2-settings",
        b"content-length",
    ]
    assert all(b"upgrade" not in names for _, _, names in received)
