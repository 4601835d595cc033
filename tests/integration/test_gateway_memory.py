"""What strangers can make the gateway hold."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import psutil
import pytest
from fakes import FakeEngine, random_reply
from gateway_processes import serving, settings_for, until, workers
from slow_cases import first_quick

CONNECTIONS = 40
BODY = 16_000_000
PIECE = 100_000
ALLOWED_GROWTH = 100e6
"""Bytes. Bodies that were read before their key cost 495 to 760 MB here."""


async def push_body(port: int, path: str, key: str) -> None:
    """Sends a body until there is an answer or the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {BODY}\r\n\r\n"
    writer.write(head.encode())
    answer = asyncio.create_task(reader.readline())
    with contextlib.suppress(ConnectionError):
        for _ in range(BODY // PIECE - 1):
            writer.write(b" " * PIECE)
            await writer.drain()
            if answer.done():
                break
    assert b" 401 " in await answer
    writer.close()


@pytest.mark.parametrize(
    "path",
    first_quick(
        [
            "/s/isk-00" + "A" * 48 + "/v1/chat/completions",
            "/s/isk-01" + "A" * 48 + "/v1/chat/completions",
            "/sessions",
            "/sessions/ses-00ff/finish",
        ]
    ),
)
async def test_forty_large_bodies_without_a_key_cost_the_gateway_no_memory(
    tiny_model: Path, tmp_path: Path, path: str
):
    async with FakeEngine(random_reply()) as engine:
        settings = settings_for(engine, tiny_model, tmp_path, workers=2)
        async with serving(settings, tmp_path) as server:
            await until(lambda: len(workers(server)) == 2)
            processes: list[psutil.Process] = workers(server)

            def held() -> int:
                return sum(process.memory_info().rss for process in processes)

            before = most = held()
            attack = asyncio.gather(
                *(
                    push_body(settings.port, path, "a-guess-of-a-key")
                    for _ in range(CONNECTIONS)
                )
            )
            while not attack.done():
                most = max(most, held())
                await asyncio.sleep(0.01)
            await attack
            assert most - before < ALLOWED_GROWTH
