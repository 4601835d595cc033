"""uvicorn's HTTP protocol with one write to the socket for what an answer writes in one go.

Head, events and end of an answer would each be a system call that wakes the client. A client that goes on
sending a body after its answer (413, 408) is listened to for a while, so that it can read it, then closed.
Used by `gateway_worker.py`."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LINGER_S = 5.0


class _Cork:
    """A transport whose writes leave together: when the answer is whole, when the event loop comes round, or
    when it is closed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        if self._held and not self._transport.is_closing():
            self._transport.write(b"".join(self._held))
        self._held.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CorkedHttpProtocol(HttpToolsProtocol):
    _lingering: asyncio.TimerHandle | None = None

    def on_response_complete(self) -> None:
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._lingering = self.loop.call_later(_LINGER_S, self.transport.close)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._lingering is not None:
            self._lingering.cancel()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Cork(transport))  # type: ignore[arg-type]
