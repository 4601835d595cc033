"""Rollout functions that behave as their task says; the workers load them by path."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from openai import OpenAI

from invrl.interfaces import Endpoint, RolloutResult
from invrl.types.tasks import Task


async def rollout(task: Task, endpoint: Endpoint) -> object:
    does = task.payload["does"]
    if does == "nothing":
        return 1.0
    client = endpoint.openai()
    async with client:  # closes the client: it must not close the others' connections
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.id}]
        )
    text = reply.choices[0].message.content or ""
    if does == "raise":
        raise LookupError("no such tool")
    if does == "first raises":
        _raise_if_first(task)
    if does in ("hang", "first raises"):
        await asyncio.Event().wait()
    if does == "nan":
        return float("nan")
    if does == "wrong type":
        return {"reward": 1.0}
    if does == "exit":
        os._exit(13)
    if does == "print and exit":
        print("before the end")
        os._exit(13)
    if does == "tell":
        print(f"the key is {endpoint.api_key}")
        Path(task.payload["file"]).write_text(endpoint.api_key)
        raise ConnectionError(f"cannot reach {endpoint.base_url}")
    if does == "fork and exit":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        with Path(task.payload["file"]).open("a") as file:
            file.write(f"{child.pid}\n")
        os._exit(13)
    if does.startswith("leak"):
        held = []
        while psutil.Process().memory_info().rss < float(task.payload["bytes"]):
            held.append(b"x" * 10**7)
        time.sleep(600 if does == "leak and block" else 0)
        await asyncio.Event().wait()
    if does == "cancel all":
        for each in asyncio.all_tasks():
            each.cancel()
        await asyncio.sleep(0)
    if does == "block":
        time.sleep(600)
    if does == "blocks for a while":
        time.sleep(1.6)
        await asyncio.Event().wait()
    return RolloutResult(reward=float(len(text) % 7), components={"letters": len(text)})


def sync_rollout(task: Task, endpoint: Endpoint) -> float:
    """In a thread of its own, with the blocking client."""
    if task.payload["does"] == "hang":
        threading.Event().wait()
    client = OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    if task.payload["does"] == "first raises":
        _raise_if_first(task)
        while True:  # until a call is refused
            client.chat.completions.create(
                model=endpoint.model, messages=[{"role": "user", "content": task.id}]
            )
    client.chat.completions.create(
        model=endpoint.model, messages=[{"role": "user", "content": task.id}]
    )
    # The async client works from a loop of one's own, too.
    asyncio.run(_ask(task, endpoint))
    return 1.0


def _raise_if_first(task: Task) -> None:
    """Of all that run this task, one raises."""
    with contextlib.suppress(FileExistsError):
        Path(task.payload["file"]).touch(exist_ok=False)
        raise LookupError("no such tool")


async def _ask(task: Task, endpoint: Endpoint) -> None:
    assert "uvloop" not in type(asyncio.get_running_loop()).__module__
    await endpoint.openai().chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": f"{task.id}, again"}],
    )


async def group_rollout(task: Task, endpoints: list[Endpoint]) -> list[float]:
    """Ranks the members by the length of what they wrote."""

    async def length(endpoint: Endpoint) -> int:
        reply = await endpoint.openai().chat.completions.create(
            model=endpoint.model, messages=[{"role": "user", "content": task.id}]
        )
        return len(reply.choices[0].message.content or "")

    lengths = await asyncio.gather(*(length(endpoint) for endpoint in endpoints))
    return [float(sorted(lengths).index(length)) for length in lengths]


group_rollout.group = True  # type: ignore[attr-defined]
