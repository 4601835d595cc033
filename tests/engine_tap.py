"""A tap on the wire: bytes pass unchanged, and what they said is kept, read with a
parser of its own.

`Tap` stands between two HTTP/1.1 parties and records every exchange. `EngineTap` stands
in front of an engine and reads `/generate`: the ids that went in, the ids, log-probs
and version spans that came out. Neither knows anything of the gateway: what it recorded
is compared with what the gateway stored (`token_truth.py`). What passed is recorded
before it is passed on, so nobody behind the tap knows more than it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass, field

import httptools


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its answer, as far as they came."""

    method: str
    path: str
    request_headers: dict[str, str]
    request: bytes
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    complete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One `/generate` as the wire had it."""

    rid: str
    input_ids: list[int]
    sampling_params: dict
    stream: bool
    ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, int]]
    """(version, start, end) as the last whole event told."""
    finish: str
    """SGLang's type, "" where the answer broke off before it was whole."""
    matched: int | str | None
    cached_tokens: int


class _Reader:
    """One direction of one connection: httptools' callbacks into exchanges."""

    def __init__(self, tap: Tap, waiting: deque[Exchange], *, requests: bool) -> None:
        self._tap = tap
        self._waiting = waiting
        self._requests = requests
        self._parser = (
            httptools.HttpRequestParser if requests else httptools.HttpResponseParser
        )(self)
        self._new()

    def feed(self, data: bytes) -> None:
        """HTTP/2 is passed on unread: the router asks so whether an engine speaks
        gRPC."""
        if not self._tap.is_http2(self._waiting, data, new=self._requests):
            self._parser.feed_data(data)

    def _new(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []

    def on_message_begin(self) -> None:
        self._new()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        if not self._requests and (status := self._parser.get_status_code()) >= 200:
            self._waiting[0].status = status
            self._waiting[0].headers = self._headers

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        if not self._requests:
            self._waiting[0].answer += body

    def on_message_complete(self) -> None:
        if self._requests:
            method = self._parser.get_method().decode()
            body = b"".join(self._body)
            path = self._url.decode()
            headers = self._headers
            self._waiting.append(
                Exchange(
                    method=method, path=path, request_headers=headers, request=body
                )
            )
        elif self._parser.get_status_code() >= 200:
            exchange = self._waiting.popleft()
            exchange.complete = True
            self._tap.ended(exchange)


class Tap:
    """Use as an async context manager: listens at `url`, passes everything to
    `upstream`."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rstrip("/").removeprefix("http://").rpartition(":")
        self._upstream = host, int(port)
        self.exchanges: list[Exchange] = []
        self.unreadable: list[str] = []
        """Why a connection could not be parsed: must stay empty."""
        self.url = ""
        self._tasks: set[asyncio.Task] = set()
        self._waiting: dict[int, deque[Exchange]] = {}
        self._http2: set[int] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", 0, backlog=4096
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def quiet(self) -> bool:
        """No request is without its whole answer."""
        return not any(self._waiting.values())

    def is_http2(self, connection: deque[Exchange], data: bytes, *, new: bool) -> bool:
        if new and data.startswith(b"PRI * HTTP/2.0"):
            self._http2.add(id(connection))
        return id(connection) in self._http2

    def ended(self, exchange: Exchange) -> None:
        """Called once per exchange, when it is complete or its connection is gone."""
        self.exchanges.append(exchange)

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        waiting: deque[Exchange] = deque()
        self._waiting[id(waiting)] = waiting
        upstream: asyncio.StreamWriter | None = None
        try:
            up_reader, upstream = await asyncio.open_connection(*self._upstream)
            there = _Reader(self, waiting, requests=True)
            back = _Reader(self, waiting, requests=False)
            pumps = [
                asyncio.create_task(self._pump(reader, upstream, there)),
                asyncio.create_task(self._pump(up_reader, writer, back)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # nobody there, or the tap is closed
        finally:
            for exchange in waiting:
                self.ended(exchange)
            for one in (writer, upstream):
                if one is not None:
                    one.transport.abort() if one is upstream else one.close()
            self._http2.discard(id(waiting))
            del self._waiting[id(waiting)]
            self._tasks.discard(task)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, parser: _Reader
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**18):
                try:
                    parser.feed(data)
                except (httptools.HttpParserError, IndexError) as error:
                    self.unreadable.append(f"{error!r}: {data[:200]!r}")
                sink.write(data)
                await sink.drain()


class EngineTap(Tap):
    """A tap that reads `/generate`, and keeps only what it read."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self.generations: list[Generation] = []

    def ended(self, exchange: Exchange) -> None:
        if exchange.path == "/generate" and exchange.status in (0, 200):
            self.generations.append(read_generation(exchange))


def read_generation(exchange: Exchange) -> Generation:
    """From the bytes of the request and of the answer, which may have broken off
    anywhere."""
    body = json.loads(exchange.request)
    stream = bool(body.get("stream"))
    events = []
    if stream:
        # the last one is "", or a part of an event
        whole = exchange.answer.split(b"\n\n")[:-1]
        lines = [
            event.removeprefix(b"data: ")
            for event in whole
            if event.startswith(b"data: {")
        ]
        events = [json.loads(line) for line in lines]
    elif exchange.complete and exchange.status == 200:
        events = [json.loads(exchange.answer)]
    ids: list[int] = []
    logprobs: list[float] = []
    meta: dict = {}
    for event in events:
        meta = event.get("meta_info") or meta
        for logprob, token, *_ in (event.get("meta_info") or {}).get(
            "output_token_logprobs"
        ) or ():
            ids.append(token)
            logprobs.append(logprob)
    listed = meta.get("weight_versions") or []
    spans = [(int(span["version"]), span["start"], span["end"]) for span in listed]
    finish = meta.get("finish_reason") or {}
    return Generation(
        rid=body["rid"],
        input_ids=body["input_ids"],
        sampling_params=body["sampling_params"],
        stream=stream,
        ids=ids,
        logprobs=logprobs,
        spans=[
            (version, start, min(end, len(ids)))
            for version, start, end in spans
            if start < len(ids)
        ],
        finish=finish.get("type", ""),
        matched=finish.get("matched"),
        cached_tokens=meta.get("cached_tokens", 0),
    )
