"""What starts side by side: the first failure ends the other starts, too."""

from __future__ import annotations

import asyncio

import pytest

from invrl.errors import ServerError
from invrl.run.processes.cluster import all_started


async def test_all_started_tasks_are_awaited() -> None:
    ready: list[str] = []

    async def start(name: str) -> None:
        await asyncio.sleep(0)
        ready.append(name)

    await all_started(start("a"), start("b"))
    assert sorted(ready) == ["a", "b"]


async def test_first_failure_is_raised_after_all_other_tasks_have_ended() -> None:
    ended: list[str] = []

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ServerError("no memory")

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an end takes a while
            ended.append("hang")

    with pytest.raises(ServerError, match="no memory"):
        await all_started(hang(), fail())
    assert ended == ["hang"]


async def test_cancelling_the_caller_ends_all_started_tasks() -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def hang() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    starting = asyncio.create_task(all_started(hang()))
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ended.is_set()
