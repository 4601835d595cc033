"""A stand-in engine that costs next to no CPU: SGLang's `/generate`, a token every so
many seconds.

`python -m benchmarks.gateway_load.paced_engine --port P --reply FILE` answers every
prompt with the same ids (a JSON list), repeated to `max_new_tokens`. Token n of an
answer is due n paces after its request came, whatever else goes on, with its log-prob
and version span, streamed as our engines do (`--incremental-streaming-output`, in events
of the labelled size) or whole. `POST /pace {"seconds": S}` sets the pace; 0 answers at
once. No stop, no cache, no batch. Started by `rig.py`."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import orjson
import uvloop

from invrl.engines.inside_sglang.request_labels import INTERVAL_LABEL

_END = b"0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


class PacedEngine:
    """What all connections share."""

    def __init__(self, reply_ids: list[int]) -> None:
        self.reply_ids = reply_ids
        self.pace_s = 0.0


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection: a request at a time, as routers and clients
    send them."""

    def __init__(self, engine: PacedEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._pending = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"PRI "):  # a router asks first whether this speaks HTTP/2
            self._transport.close()
            return
        self._pending += data
        while (end := self._pending.find(b"\r\n\r\n")) >= 0:
            head, _, fields = bytes(self._pending[:end]).lower().partition(b"\r\n")
            length = 0
            for line in fields.split(b"\r\n"):
                name, _, value = line.partition(b":")
                if name == b"content-length":
                    length = int(value)
            if len(self._pending) < end + 4 + length:
                return
            body = bytes(self._pending[end + 4 : end + 4 + length])
            del self._pending[: end + 4 + length]
            self._request(head.split(b" ")[1], body)

    def _request(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            _Generation(self, orjson.loads(body)).start()
            return
        if path == b"/pace":
            self._engine.pace_s = float(orjson.loads(body)["seconds"])
        self.whole(b"{}")

    @property
    def engine(self) -> PacedEngine:
        return self._engine

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def whole(self, body: bytes) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        self._transport.write(head + body)

    def at(self, when: float, call: Callable[[], None]) -> None:
        self._timer = self._loop.call_at(when, call)


class _Generation:
    """One answer on its way."""

    def __init__(self, connection: Connection, request: dict) -> None:
        self._connection = connection
        self._rid, self._stream = request["rid"], bool(request.get("stream"))
        self._prompt, self._tokens = (
            len(request["input_ids"]),
            request["sampling_params"]["max_new_tokens"],
        )
        self._pace_s, self._ids = connection.engine.pace_s, connection.engine.reply_ids
        labels = request.get("custom_labels") or {}
        interval = int(labels.get(INTERVAL_LABEL, 1))
        self._ends = deque([*range(1, self._tokens, interval), self._tokens])
        """Number of tokens up to the end of each event that is not sent yet."""
        self._sent = 0
        self._began = asyncio.get_running_loop().time()

    def start(self) -> None:
        if self._stream:
            self._connection.write(_STREAM_HEAD)
            self._connection.at(self._due_at(), self._next)
        else:
            self._connection.at(self._began + self._tokens * self._pace_s, self._all)

    def _all(self) -> None:
        self._connection.whole(self._event(0, self._tokens))

    def _due_at(self) -> float:
        """When the next event is due."""
        return self._began + self._ends[0] * self._pace_s

    def _next(self) -> None:
        """The events that are due; more than one only where this process is late."""
        now = asyncio.get_running_loop().time()
        data = b""
        while self._ends and (not data or (self._pace_s and self._due_at() <= now)):
            end = self._ends.popleft()
            part = b"data: " + self._event(self._sent, end) + b"\n\n"
            data += b"%x\r\n%s\r\n" % (len(part), part)
            self._sent = end
        if self._ends:
            self._connection.write(data)
            self._connection.at(self._due_at(), self._next)
        else:
            self._connection.write(data + b"e\r\ndata: [DONE]\n\n\r\n" + _END)

    def _event(self, start: int, end: int) -> bytes:
        """As SGLang's, field by field, of tokens [start, end)."""
        ids = [self._ids[at % len(self._ids)] for at in range(start, end)]
        done = (
            {"type": "length", "length": self._tokens} if end == self._tokens else None
        )
        meta = {
            "id": self._rid,
            "finish_reason": done,
            "prompt_tokens": self._prompt,
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": end}],
            "total_retractions": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "output_token_logprobs": [
                [fixed_logprob(token), token, None] for token in ids
            ],
        }
        return orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


def fixed_logprob(token: int) -> float:
    """The log-prob that the stand-in gives a token: as long in JSON as a real one."""
    return -(token % 97 + 1) / 97


async def serve(port: int, reply_ids: list[int]) -> None:
    engine = PacedEngine(reply_ids)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(engine), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="a stand-in engine that emits tokens at a fixed pace"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--reply", type=Path, required=True, help="JSON list of token ids"
    )
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(options.port, json.loads(options.reply.read_text())))


if __name__ == "__main__":
    main()
