"""`python -m benchmarks.update_streams`: 1,000 streams held open while the weights they
come from are updated.

A training run of the real stack on a tiny random model, as a user starts it; beside its
own rollouts, streams of serving sessions through its gateway. Writes
results/update_streams.json. By hand: it takes two minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
from tiny_model import make_tiny_model

from benchmarks import ROOT
from benchmarks.record import RESULTS
from invrl.host.network.ports import free_port
from invrl.interfaces import Endpoint
from invrl.rollout.workers.session_client import SessionClient
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task

TESTS = ROOT / "tests"
STREAMS = 1000
TOKENS = 200
DEADLINE_S = 900.0


async def rollout(task: Task, endpoint: Endpoint) -> float:
    """Few tokens: it takes its turn with the streams, so that a step ends while they go
    on."""
    client = endpoint.openai()
    text = ""
    prompt = str(task.payload["prompt"])
    for _ in range(2):
        reply = await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=8,
        )
        text = reply.choices[0].message.content or ""
    return sum(ord(char) % 2 == 0 for char in text) / max(1, len(text))


class Streams:
    """All at once, each in a session of its own."""

    def __init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.open = self.most_open = self.keep_alives = self.tokens = 0
        self.longest_silence_s = 0.0

    async def run(self, sessions: Sequence[Session], model: str) -> None:
        http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
        )
        async with http:
            await asyncio.gather(
                *(self._stream(http, session, model) for session in sessions)
            )

    async def _stream(
        self, http: aiohttp.ClientSession, session: Session, model: str
    ) -> None:
        body = {"model": model, "stream": True, "max_tokens": TOKENS, "logprobs": True}
        body["messages"] = [{"role": "user", "content": "say fox"}]
        headers = {"authorization": f"Bearer {session.key}"}
        url = f"{session.base_url}/chat/completions"
        try:
            async with http.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise RuntimeError(
                        f"{answer.status}: {(await answer.text())[:200]}"
                    )
                self.open += 1
                self.most_open, last, line = (
                    max(self.most_open, self.open),
                    time.monotonic(),
                    b"",
                )
                async for line in answer.content:
                    self.keep_alives += line.startswith(b": waiting")
                    if line.startswith(b"data: {"):
                        self._count(json.loads(line[6:]))
                        now = time.monotonic()
                        self.longest_silence_s, last = (
                            max(self.longest_silence_s, now - last),
                            now,
                        )
                self.open -= 1
        except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
            self.errors[repr(error)[:200]] += 1

    def _count(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        for choice in event["choices"]:
            self.tokens += len((choice["logprobs"] or {"content": ()})["content"])


async def _load(url: str, key: str, run: Path) -> Streams:
    client = SessionClient(url, env_key=key)
    streams = Streams()
    sessions = list[Session]()
    deadline = time.monotonic() + DEADLINE_S
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("rollout/reward_mean") < 2:
        assert time.monotonic() < deadline, "waited for the second step"
        await asyncio.sleep(0.2)
    for start in range(0, STREAMS, 250):
        members = tuple(GroupMember(index=start + at, attempt=0) for at in range(250))
        lease = GroupLease(
            group_id=f"streams-{uuid4().hex}",
            task=Task(id="streams", payload={}),
            members=members,
        )
        sessions += await client.open(
            lease, purpose="serve", sampling=Sampling(max_new_tokens=TOKENS)
        )
    await client.close()
    await streams.run(sessions, "model")
    return streams


def _of_store(run: Path) -> dict[str, Any]:
    """What the run recorded of the streams."""
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        sql = (
            "SELECT spans, delivered FROM turns JOIN sessions ON sessions.id=session_id"
        )
        sql += " WHERE task_id='streams'"
        rows = [(json.loads(spans), delivered) for spans, delivered in db.execute(sql)]
    versions = Counter(len({span["version"] for span in spans}) for spans, _ in rows)
    return {
        "turns": len(rows),
        "delivered": sum(delivered for _, delivered in rows),
        "tokens_recorded": sum(spans[-1]["end"] for spans, _ in rows),
        "turns_by_versions": {
            str(count): versions[count] for count in sorted(versions)
        },
        "versions": sorted(
            {int(span["version"]) for spans, _ in rows for span in spans}
        ),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="invrl-streams-") as folder:
        run = Path(folder) / "run"
        key = f"env-{uuid4().hex}"
        port = free_port()
        flags = {
            **{
                "config": TESTS / "e2e/trivial.toml",
                "model-path": make_tiny_model(Path(folder) / "model"),
            },
            **{
                "run-root": folder,
                "run-name": "run",
                "num-steps": 1000,
                "gateway-port": port,
            },
            **{
                "rollout-function-path": "benchmarks.update_streams:rollout",
                "max-new-tokens": TOKENS,
            },
            **{
                "engine-max-total-tokens": 400_000,
                "sglang-max-running-requests": STREAMS + 200,
            },
            **{"max-open-sessions": 2 * STREAMS, "save-interval-s": 0},
        }
        command = [sys.executable, "-m", "invrl.cli", "train"]
        command += [
            text for name, value in flags.items() for text in (f"--{name}", str(value))
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "INVRL_ENV_KEY": key}
        env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(ROOT)])
        training = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            began = time.monotonic()
            streams = asyncio.run(_load(f"http://127.0.0.1:{port}", key, run))
            seconds = time.monotonic() - began
        finally:
            training.send_signal(signal.SIGINT)
            training.wait(150)
        found = {
            **{
                "streams": STREAMS,
                "tokens_each": TOKENS,
                "open_at_once": streams.most_open,
            },
            **{"seconds_with_start": round(seconds, 1), "tokens_seen": streams.tokens},
            **{"errors": dict(streams.errors), "keep_alives": streams.keep_alives},
            **{
                "longest_silence_s": round(streams.longest_silence_s, 1),
                **_of_store(run),
            },
        }
    (RESULTS / "update_streams.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
