"""What an answer writes in one go leaves in one write; nothing is lost, or written to a closed connection."""

from __future__ import annotations

import asyncio

from invrl.gateway.corked_http import _Cork


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

    def get_extra_info(self, name: str) -> str:
        return name


async def test_writes_of_one_turn_of_the_loop_leave_together():
    wire = Wire()
    cork = _Cork(wire)  # type: ignore[arg-type]
    cork.write(b"head ")
    cork.write(b"body")
    assert wire.written == []
    await asyncio.sleep(0)
    assert wire.written == [b"head body"]
    cork.write(b"more")
    await asyncio.sleep(0)
    assert wire.written == [b"head body", b"more"]
    assert cork.get_extra_info("peername") == "peername"


async def test_closing_writes_what_was_held_first():
    wire = Wire()
    cork = _Cork(wire)  # type: ignore[arg-type]
    cork.write(b"last")
    cork.close()
    assert (wire.written, wire.closed) == ([b"last"], True)
    cork.write(b"too late")
    await asyncio.sleep(0)
    assert wire.written == [b"last"]
