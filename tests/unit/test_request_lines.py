"""Raw request lines at a gateway of two workers: a request reaches a worker of this
gateway, or nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence

import pytest
from gateway_workers import Workers

from invrl.errors import SessionError
from invrl.gateway.server.workers.forwarder import _target_of


class Stranger:
    """A server that is not part of the gateway; it counts its connections."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.address = ""

    async def __call__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.num_connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nstranger")
        await writer.drain()
        writer.close()


@pytest.fixture
async def stranger() -> AsyncIterator[Stranger]:
    server = Stranger()
    listener = socket.create_server(("127.0.0.1", 0))
    server.address = f"127.0.0.1:{listener.getsockname()[1]}"
    listening = await asyncio.start_server(server, sock=listener)
    yield server
    listening.close()


async def status_and_body(url: str, line: bytes, key: str) -> tuple[int, bytes]:
    """What a gateway answers to this request line, which may hold any bytes. Status 0:
    it closed the connection without an answer."""
    port = int(url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        b"host: gateway\r\nauthorization: Bearer "
        + key.encode()
        + b"\r\nconnection: close\r\n\r\n"
    )
    writer.write(line + b"\r\n" + head)
    async with asyncio.timeout(60):
        answer = await reader.read(-1)
    writer.close()
    if not answer:
        return 0, b""
    assert answer.count(b"HTTP/1.1 ") == 1, "one answer to one request"
    first_line, _, _ = answer.partition(b"\r\n")
    return int(first_line.split()[1]), answer.partition(b"\r\n\r\n")[2]


REFUSED = (
    "GET *@{stranger}/v1/models HTTP/1.1",
    "POST *@{stranger}/s/{key}/v1/models HTTP/1.1",
    "GET *:x@{stranger}/v1/models HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "GET @{stranger}/v1/models HTTP/1.1",
    "GET .{stranger}/v1/models HTTP/1.1",
    "GET :80@{stranger}/v1/models HTTP/1.1",
    "GET ?@{stranger}/v1/models HTTP/1.1",
    "GET \\\\{stranger}/v1/models HTTP/1.1",
    "GET {stranger} HTTP/1.1",
    "GET ftp://{stranger}/v1/models HTTP/1.1",
    "GET http://{stranger} HTTP/1.1",
    "CONNECT {stranger} HTTP/1.1",
    "GET /v1/models\0 HTTP/1.1",
    "GET /v1/\tmodels HTTP/1.1",
    "GET /v1/models\rhost: {stranger} HTTP/1.1",
    "GET  HTTP/1.1",
)


SERVED = (
    "GET http://{stranger}/v1/models HTTP/1.1",
    "GET HTTPS://u:p@{stranger}/s/{key}/v1/models HTTP/1.1",
    "GET /s%2F{key}%2fv1/models HTTP/1.1",
    "GET /v1/models?next=http://{stranger}/%0d%0a#f HTTP/1.1",
    "GET /v1/models\nhost: {stranger} HTTP/1.1",
)
NOT_FOUND = (
    "GET //{stranger}/v1/models HTTP/1.1",
    "GET /@{stranger}/v1/models HTTP/1.1",
    "GET /v1/..//{stranger}/v1/models HTTP/1.1",
    "GET /\\{stranger}/v1/models HTTP/1.1",
    "GET /v1/models%00 HTTP/1.1",
    "GET /v1/models%0d%0ahost:%20{stranger} HTTP/1.1",
    "GET /s/{key}%00/v1/models HTTP/1.1",
    "GET /sessions/ses-01%00 HTTP/1.1",
    "GET /sessions/ses-01%ff%2f..%2f.. HTTP/1.1",
    "GET /sessions/..%2f..%2fv1/models HTTP/1.1",
    "GET /%zz HTTP/1.1",
)


async def statuses_by_line(
    workers: Workers, stranger: Stranger, lines: Sequence[str], *, key: str
) -> dict[str, set[int]]:
    """What the workers of the gateway answer to each of the lines."""
    statuses: dict[str, set[int]] = {}
    for line in lines:
        raw_line = line.format(stranger=stranger.address, key=key).encode()
        answers = [await status_and_body(url, raw_line, key) for url in workers.urls]
        statuses[line] = {status for status, _ in answers}
    return statuses


@pytest.mark.parametrize(
    "closed", [False, True], ids=["open session", "closed session"]
)
async def test_a_line_that_names_no_path_reaches_nobody(
    workers: Workers, stranger: Stranger, closed: bool
):
    [session] = await workers.at[1].open()
    if closed:
        await workers.at[1].finish(session)
    statuses = await statuses_by_line(workers, stranger, REFUSED, key=session.key)
    assert stranger.num_connections == 0
    assert {
        line: found for line, found in statuses.items() if not found <= {0, 400}
    } == {}


async def test_a_whole_url_and_an_encoded_path_mean_the_path(
    workers: Workers, stranger: Stranger
):
    [session] = await workers.at[1].open()
    statuses = await statuses_by_line(workers, stranger, SERVED, key=session.key)
    assert stranger.num_connections == 0
    assert set().union(*statuses.values()) == {200}, statuses


async def test_a_path_is_never_taken_for_an_address(
    workers: Workers, stranger: Stranger
):
    """Both workers say the same, whichever of them holds the session."""
    [session] = await workers.at[1].open()
    statuses = await statuses_by_line(workers, stranger, NOT_FOUND, key=session.key)
    assert stranger.num_connections == 0
    assert {
        line: found for line, found in statuses.items() if found not in ({401}, {404})
    } == {}


@pytest.mark.parametrize(
    "path", ["*@stranger:80/v1", "stranger", ":80/", "@stranger/", ""]
)
def test_the_address_of_a_forwarded_request_is_the_workers(path: str):
    """Whatever server is in front of the application."""
    with pytest.raises(SessionError, match="does not begin with /"):
        _target_of({"raw_path": path.encode(), "query_string": b""})


def test_path_and_query_are_forwarded_byte_for_byte():
    scope = {"raw_path": b"//a%2Fb/../c", "query_string": b"x=%20+&y=/"}
    assert _target_of(scope) == "//a%2Fb/../c?x=%20+&y=/"
