"""A request whose body is sent piece by piece, and the answer that comes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import httpx


@dataclass(kw_only=True)
class Upload:
    """A request's body as it is sent, piece after piece, and the answer that comes
    meanwhile."""

    sent: int = 0
    status: int = 0
    raw: bytes = b""

    async def send(
        self, url: str, path: str, head: str, pieces: int, pause_s: float = 0.0
    ) -> None:
        """Ends with the last piece, or when the other side has closed the
        connection."""
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        reading = asyncio.create_task(self.read(reader))
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())
        piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(pieces):
                writer.write(piece)
                await writer.drain()
                self.sent += 2**16
                await asyncio.sleep(pause_s)
        await reading
        writer.close()

    async def read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.status = int(head.split()[1])
        length = next(
            line
            for line in head.lower().splitlines()
            if line.startswith("content-length")
        )
        self.raw = await reader.readexactly(int(length.split(":")[1]))

    def answer(self) -> httpx.Response:
        return httpx.Response(
            self.status, content=self.raw, headers={"content-type": "application/json"}
        )


CHUNKED = "transfer-encoding: chunked"
