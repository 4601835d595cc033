"""A rollout worker is ready once its first request needs no more imports: they would
hold up all of its rollouts."""

from __future__ import annotations

import subprocess
import sys

WORKER = """
import asyncio, sys
from invrl.rollout.config import RolloutConfig
from invrl.rollout.workers.worker_actor import RolloutWorker, WorkerSettings

async def rollout(task, endpoint):
    return 0.0

settings = WorkerSettings(
    gateway_url="http://127.0.0.1:9",
    model="m",
    rollout=RolloutConfig(rollout_function_path="__main__:rollout"),
)
asyncio.run(RolloutWorker(settings).ready())

import openai

imported = set(sys.modules)
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="k")
client.chat.completions
print([name for name in sys.modules if name.startswith("openai.") and name not in imported])
"""


def test_ready_worker_has_imported_what_a_chat_request_needs() -> None:
    worker = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=240
    )
    assert worker.stdout == "[]\n", worker.stderr
