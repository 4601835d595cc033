"""Keep-alive connections: whole and chunked answers, reuse, and every way in which a
server lets go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from invrl.host.network.http_connection import HttpConnections, HttpError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(
    params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def run(request: pytest.FixtureRequest):
    def run(test: Callable[[], object]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]

    return run


class Server:
    """Answers each request with the next of `answers`: bytes, events to wait for, None
    for the connection's end."""

    def __init__(self, *answers: list[bytes | asyncio.Event | None]) -> None:
        self.answers = list(answers)
        self.requests = []
        self.connections = 0
        self.left = asyncio.Event()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(
                    head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                )
                self.requests.append((head, await reader.readexactly(length)))
                for part in self.answers.pop(0):
                    if isinstance(part, asyncio.Event):
                        await part.wait()
                    elif part is None:
                        writer.close()
                        return
                    else:
                        writer.write(part)
                        await writer.drain()
        self.left.set()
        writer.close()

    @contextlib.asynccontextmanager
    async def running(self, idle_s: float = 60.0) -> AsyncIterator[HttpConnections]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        http = HttpConnections(
            f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/",
            idle_s=idle_s,
        )
        try:
            yield http
        finally:
            http.close()
            server.close()


async def ask(http: HttpConnections) -> tuple[int, bytes]:
    async with http.request("POST", "/x", {"Extra": "é"}, b"body") as answer:
        return answer.status, await answer.read()


def test_idle_connection_is_reused(run):
    async def test():
        refusal = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno"
        server = Server(
            [WHOLE],
            [WHOLE[:20], WHOLE[20:41], WHOLE[41:]],
            [refusal],
            [CHUNKED, b"0\r\n\r\n"],
        )
        async with server.running() as http:
            assert [await ask(http) for _ in range(4)] == [
                (200, b"hello"),
                (200, b"hello"),
                (503, b"no"),
                (200, b""),
            ]
        assert server.connections == 1
        head, body = server.requests[0]
        assert head.startswith(b"POST /base/x HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"Extra: \xe9\r\n" in head
        assert body == b"body"

    run(test)


def test_concurrent_calls_have_one_connection_each(run):
    async def test():
        gate = asyncio.Event()
        server = Server([gate, WHOLE], [WHOLE], [WHOLE])
        async with server.running() as http:
            first = asyncio.create_task(ask(http))
            while not server.requests:
                await asyncio.sleep(0.001)
            assert await ask(http) == (200, b"hello")
            gate.set()
            assert await first == (200, b"hello")
            assert await ask(http) == (200, b"hello")
        assert server.connections == 2

    run(test)


def test_streamed_pieces_arrive_as_they_are_sent(run):
    async def test():
        gate = asyncio.Event()
        async with Server(
            [CHUNKED, b"3\r\none\r\n", gate, b"3\r\ntwo\r\n0\r\n\r\n"]
        ).running() as http:
            pieces = []
            async with http.request("GET", "/", {}, b"") as answer:
                async for piece in answer.pieces():
                    pieces.append(piece)
                    gate.set()
        assert pieces == [b"one", b"two"]

    run(test)


def test_leaving_a_stream_early_closes_its_connection(run):
    async def test():
        server = Server(
            [CHUNKED, b"3\r\none\r\n", never := asyncio.Event(), b"x"], [WHOLE]
        )
        async with server.running() as http:
            async with http.request("GET", "/", {}, b"") as answer:
                async for _ in answer.pieces():
                    break
            never.set()
            await server.left.wait()
            assert await ask(http) == (200, b"hello")
        assert server.connections == 2

    run(test)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([None], "closed the connection"),
        ([WHOLE[:-2], None], "closed the connection"),
        ([CHUNKED, b"3\r\none\r\n", None], "closed the connection"),
        ([b"220 smtp.example.com ESMTP\r\n"], "no HTTP/1.1"),
    ],
)
def test_broken_off_response_is_an_error(run, answer, reason):
    async def test():
        server = Server(answer, [WHOLE])
        async with server.running() as http:
            with pytest.raises(HttpError, match=reason):
                await ask(http)
            assert await ask(http) == (200, b"hello")  # on another connection

    run(test)


@pytest.mark.parametrize("more", [b"more", WHOLE, WHOLE + WHOLE])
def test_surplus_bytes_of_a_response_close_its_connection(run, more):
    async def test():
        server = Server([WHOLE + more], [WHOLE])
        async with server.running() as http:
            assert [await ask(http) for _ in range(2)] == [(200, b"hello")] * 2
        assert server.connections == 2

    run(test)


def test_unread_response_is_not_returned_to_the_next_request(run):
    async def test():
        server = Server([WHOLE.replace(b"hello", b"stale")], [WHOLE])
        async with server.running() as http:
            async with http.request("POST", "/x", {}, b"") as answer:
                assert answer.status == 200
            assert await ask(http) == (200, b"hello")
        assert server.connections == 1

    run(test)


def test_closed_or_old_connection_is_not_reused(run):
    async def test():
        closing = WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        server = Server([closing], [WHOLE, None], [WHOLE])
        async with server.running() as http:
            for _ in range(2):
                assert await ask(http) == (200, b"hello")
            while http._idle[0][1].reusable:  # until its end has been seen
                await asyncio.sleep(0.001)
            assert await ask(http) == (200, b"hello")
        assert server.connections == 3
        server = Server([WHOLE], [WHOLE])
        async with server.running(idle_s=0.0) as http:
            assert [await ask(http) for _ in range(2)] == [(200, b"hello")] * 2
        assert server.connections == 2

    run(test)


def test_refused_connection_is_an_http_error(run):
    async def test():
        async with Server().running() as http:
            pass
        with pytest.raises(HttpError, match=r"cannot connect to 127\.0\.0\.1"):
            await ask(http)

    run(test)


def test_headers_of_each_response_are_its_own(run):
    async def test():
        first = WHOLE.replace(b"\r\n\r\n", b"\r\nX-Own: 1\r\nX-Own: 2\r\n\r\n")
        async with Server([first], [WHOLE]).running() as http:
            async with http.request("GET", "/", {}, b"") as answer:
                await answer.read()
                assert answer.headers == {"content-length": "5", "x-own": "2"}
            async with http.request("GET", "/", {}, b"") as answer:
                assert answer.headers == {"content-length": "5"}

    run(test)


def test_response_to_head_has_no_body_whatever_length_it_names(run):
    async def test():
        server = Server([WHOLE.removesuffix(b"hello")], [WHOLE])
        async with server.running() as http:
            async with http.request("HEAD", "/", {}, b"") as answer:
                assert answer.headers == {"content-length": "5"}
                assert await answer.read() == b""
            assert await ask(http) == (200, b"hello")

    run(test)


def test_host_of_the_caller_replaces_that_of_the_server(run):
    async def test():
        server = Server([WHOLE])
        async with (
            server.running() as http,
            http.request("GET", "/", {"host": "own"}, b"") as answer,
        ):
            await answer.read()
        head, _ = server.requests[0]
        assert head.lower().count(b"host: ") == 1
        assert b"\r\nhost: own\r\n" in head

    run(test)


def test_server_waits_for_a_slow_reader(run):
    """The body is of any size, and no more of it than a bound is in memory."""

    async def test():
        piece = b"10000\r\n" + 65536 * b"x" + b"\r\n"
        num_pieces = 512
        server = Server([CHUNKED, *([piece] * num_pieces), b"0\r\n\r\n"], [WHOLE])
        async with server.running() as http:
            async with http.request("GET", "/", {}, b"") as answer:
                await asyncio.sleep(0.3)
                assert 0 < answer._body_bytes < num_pieces * 65536 / 8
                assert len(await answer.read()) == num_pieces * 65536
            async with http.request("GET", "/", {}, b"") as answer:
                assert await answer.read() == b"hello"
        assert server.connections == 1

    run(test)


def test_connection_that_takes_too_long_is_an_http_error(run):
    async def test():
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(4)]
            for client in waiting:  # until the kernel accepts no further one
                client.setblocking(False)
                client.connect_ex(address)
            http = HttpConnections(
                f"http://127.0.0.1:{address[1]}", idle_s=1.0, connect_s=0.2
            )
            with pytest.raises(HttpError, match="cannot connect"):
                await ask(http)
            for client in waiting:
                client.close()

    run(test)
