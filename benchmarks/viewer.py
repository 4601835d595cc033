"""How fast `invrl view` answers on a store of 100,000 rollouts, and what it costs a run
that is live.

    python -m benchmarks.viewer [--rollouts 100000] [--folder FOLDER] [--live-s 60]
    [--out FILE]

Opening: from the start of the process to the first `/api/runs` and the first page of
rollouts, without an index, which is filled meanwhile, and with one. Then every filter,
sort and search twice, and the slowest. Live: a process appends 10 rollouts of 3 turns
per second, each in the transactions that a gateway and a buffer would make, with and
without a viewer whose page is open; the viewer's CPU seconds per second, and how much
longer the writer's transactions take.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np
import psutil

from benchmarks.record import entry
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.store.run_folder import RunFolder
from invrl.store.schema import connect

GROUP_SIZE = 8
GROUPS_PER_STEP = 16
TURNS = 3
TOKENS = 80
WORDS = 60
LIVE_RATE = 10
"""Rollouts per second of the live run: those of a step of 600 every minute."""
QUERIES: dict[str, dict[str, str]] = {
    "no filter": {},
    "step": {"step": "300"},
    "task": {"task": "task-77"},
    "purpose": {"purpose": "eval"},
    "state": {"state": "dropped"},
    "drop": {"drop": "zero_variance"},
    "failure": {"failure": "timeout"},
    "fork": {"fork": "history_edited"},
    "truncated": {"truncated": "1"},
    "trained": {"trained": "0"},
    "reward": {"min_reward": "0.25", "max_reward": "0.75"},
    "tokens": {"min_tokens": "200", "sort": "tokens"},
    "turns": {"max_turns": "2"},
    "staleness": {"min_staleness": "2"},
    "component": {"component": "format", "min_component": "0.9"},
    "surprise": {"min_surprise": "1.5"},
    "everything": {
        "purpose": "train",
        "trained": "1",
        "truncated": "0",
        "min_reward": "0.1",
        "fork": "compacted",
    },
    **{
        f"sort {name}": {"sort": name}
        for name in ("best", "worst", "surprising", "opened_at", "step", "reward")
    },
    **{
        f"sort {name}": {"sort": name}
        for name in ("tokens", "turns", "forks", "staleness", "seconds", "logprob")
    },
    **{
        f"sort {name}": {"sort": name}
        for name in ("index", "task", "state", "advantage", "gap", "surprise")
    },
    "last page": {"offset": "99950", "sort": "reward"},
    "search rare": {"q": "w19999"},
    "search common": {"q": "w0"},
    "search prefix": {"q": "w1"},
    "search two": {"q": "w0 w1"},
    "search phrase": {"q": '"w0 w1"'},
    "search and filter": {
        "q": "w5",
        "purpose": "train",
        "sort": "worst",
        "min_reward": "0.5",
    },
}
PAGES = (
    "steps",
    "groups",
    "facets",
    "tasks",
    "ledger",
    "evaluations",
    "weights",
    "timeline",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the run is made, or lies from an earlier start",
    )
    parser.add_argument("--live-s", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="viewer-bench-"))
    cache = Path(tempfile.mkdtemp(prefix="viewer-bench-cache-"))
    try:
        result = measure(folder, cache, options.rollouts, options.live_s)
    finally:
        shutil.rmtree(cache)
        if options.folder is None:
            shutil.rmtree(folder)
    head = msgspec.to_builtins(entry("none", {}))
    del head["model"], head["ratios"]
    text = json.dumps({**head, **result}, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return 0


def measure(root: Path, cache: Path, rollouts: int, live_s: int) -> dict[str, Any]:
    folder = make_run(root, rollouts)
    size_mb = folder.store_path.stat().st_size / 1e6
    result: dict[str, Any] = {
        "rollouts": rollouts,
        "turns": rollouts * TURNS,
        "store_mb": round(size_mb),
    }
    with Viewer(folder.path, cache) as viewer:
        result["open_first_time_s"] = viewer.opening_s
        result["rows_complete_s"] = viewer.wait_until(
            lambda state: state["rollouts_indexed"] >= rollouts
        )
        result["index_complete_s"] = viewer.wait_until(lambda state: state["ready"])
    result["index_mb"] = round(
        sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / 1e6
    )
    openings: list[float] = []
    for _ in range(5):
        with Viewer(folder.path, cache) as viewer:
            openings.append(viewer.opening_s)
    result["open_s"] = sorted(openings)
    with Viewer(folder.path, cache) as viewer:
        viewer.wait_until(lambda state: state["ready"])
        result["first_time_s"] = viewer.times()
        result["warm_s"] = viewer.times()
    result["slowest"] = {
        kind: max(result[kind].items(), key=lambda item: item[1])
        for kind in ("first_time_s", "warm_s")
    }
    result["live"] = live_cost(folder, cache, live_s)
    return result


class Viewer:
    """`invrl view` as a user starts it."""

    def __init__(self, run: Path, cache: Path) -> None:
        self._command = [
            sys.executable,
            "-m",
            "invrl.cli.main",
            "view",
            str(run),
            "--no-open",
        ]
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        self._run = run.name

    def __enter__(self) -> Viewer:
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout
        line = self._process.stdout.readline()
        url = line.split()[-1]
        address, _, self._key = url.removeprefix("http://").partition("/?key=")
        self._connection = http.client.HTTPConnection(address, timeout=300)
        self.get("runs")
        deadline = time.monotonic() + 60
        while not self._has_rows() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.opening_s = round(time.monotonic() - self.started, 3)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)

    def _has_rows(self) -> bool:
        status, body = self.get_status("rollouts")
        return status == 200 and bool(json.loads(body)["rows"])

    @property
    def pid(self) -> int:
        return self._process.pid

    def get_status(
        self, page: str, query: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        path = f"/api/{page}" if page == "runs" else f"/api/runs/{self._run}/{page}"
        if query:
            path += f"?{urlencode(query)}"
        self._connection.request(
            "GET", path, headers={"Authorization": f"Bearer {self._key}"}
        )
        response = self._connection.getresponse()
        return response.status, response.read()

    def get(self, page: str, query: dict[str, str] | None = None) -> Any:
        status, body = self.get_status(page, query)
        if status != 200:
            raise RuntimeError(f"{page} {query}: {status} {body[:300]!r}")
        return json.loads(body)

    def wait_until(self, condition: Any) -> float:
        """Seconds since the start until the index is in this state."""
        while not condition(self.get("runs")["runs"][0]["index"]):
            time.sleep(0.2)
        return round(time.monotonic() - self.started, 2)

    def times(self) -> dict[str, float]:
        """Seconds of every question: page of rollouts and facets together, as the page
        asks for both."""
        seconds: dict[str, float] = {}
        for name, query in QUERIES.items():
            started = time.monotonic()
            self.get("rollouts", query)
            seconds[name] = round(time.monotonic() - started, 3)
            if not name.startswith("sort"):
                started = time.monotonic()
                self.get("facets", query)
                seconds[f"facets: {name}"] = round(time.monotonic() - started, 3)
        for name in PAGES:
            started = time.monotonic()
            self.get(name)
            seconds[f"page {name}"] = round(time.monotonic() - started, 3)
        [row] = self.get("rollouts", {"limit": "1"})["rows"]
        started = time.monotonic()
        detail = self.get(f"rollouts/{row['session_id']}")
        seconds["page rollout"] = round(time.monotonic() - started, 3)
        started = time.monotonic()
        self.get(f"turns/{detail['turns'][0]['id']}/tokens")
        seconds["page tokens"] = round(time.monotonic() - started, 3)
        return seconds

    def follow(self, until: threading.Event) -> threading.Thread:
        """An open page: reads the stream of changes, and asks for the rollouts at
        each."""

        def read() -> None:
            address = f"{self._connection.host}:{self._connection.port}"
            stream = http.client.HTTPConnection(address, timeout=30)
            pages = http.client.HTTPConnection(address, timeout=30)
            headers = {"Authorization": f"Bearer {self._key}"}
            stream.request("GET", "/api/events", headers=headers)
            response = stream.getresponse()
            while not until.is_set():
                line = response.readline()
                if not line:
                    return
                if line.startswith(b"data:"):
                    pages.request(
                        "GET", f"/api/runs/{self._run}/rollouts", headers=headers
                    )
                    pages.getresponse().read()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


# ----------------------------------------------------------------- the run


def make_run(root: Path, rollouts: int) -> RunFolder:
    """A run folder with so many rollouts, made once."""
    tables = {"run": {"run_root": str(root), "run_name": "run"}}
    folder = make_run_folder(resolve(Source(name="bench", tables=tables)))
    db = connect(folder.store_path)
    if db.execute("SELECT COUNT(*) FROM sessions").fetchone()[0] >= rollouts:
        return folder
    random = Random(0)
    db.execute("PRAGMA synchronous=OFF")
    db.execute(
        "INSERT INTO incarnations (parent, step, sequence, started_at) VALUES (0, 0, 0, 1000.0)"
    )
    db.execute("INSERT INTO tool_lists VALUES (?,?)", (b"none", b"[]"))
    db.execute("BEGIN")
    for number in range(rollouts):
        for sql, values in statements(number, random):
            db.execute(sql, values)
        if number % 5_000 == 4_999:
            db.execute("COMMIT")
            db.execute("BEGIN")
            print(f"{number + 1:,} rollouts made", file=sys.stderr)
    db.execute("COMMIT")
    db.close()
    with folder.metrics_path.open("w") as file:
        for step in range(rollouts // (GROUP_SIZE * GROUPS_PER_STEP)):
            row = {
                "step": step,
                "time": 1000.0 + step,
                **{f"m/{n}": random.random() for n in range(150)},
            }
            file.write(json.dumps(row) + "\n")
    return folder


def statements(number: int, random: Random) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """One rollout: session, turns, outcome, outbox, ledger."""
    group = number // GROUP_SIZE
    is_eval = group % 10 == 9
    step = group // GROUPS_PER_STEP + 1
    session_id = f"ses-{number:018x}"
    task_id = f"task-{group % 2000}"
    if group >= 2000:
        task_id += f"@{group // 2000}"
    group_id = f"eval/{step}/greedy/{task_id}" if is_eval else f"g{group}"
    index = number % GROUP_SIZE
    reward = random.choice((0.0, 0.0, 0.3, 0.5, 1.0, 1.0))
    opened = 1000.0 + number / 10
    fails = number % 20 == 7
    dropped = "zero_variance" if group % 23 == 5 else ""
    identity = {
        "session_id": session_id,
        "task_id": task_id,
        "group_id": group_id,
        "index": index,
        "attempt": 0,
    }
    summary = {
        **identity,
        "outcome": "finished",
        "reward": reward,
        "reward_components": {"correct": reward, "format": random.random()},
        "num_turns": TURNS,
        "prompt_tokens": 900,
        "cached_tokens": 700,
        "later_prompt_tokens": 600,
        "later_cached_tokens": 550,
        "sampled_tokens": TURNS * TOKENS,
        "trained_tokens": TURNS * TOKENS,
        "truncated": number % 9 == 0,
        "oldest_version": max(0, step - 1 - random.randrange(4)),
        "newest_version": step - 1,
        "forks": int(number % 15 == 0),
        "counts": {"forks/history_edited": 1}
        if number % 15 == 0
        else {"matches/exact": 2},
        "started_at": opened,
        "finished_at": opened + 30 * random.random(),
    }
    outcome: dict[str, Any] = summary
    if fails:
        detail = (
            "Traceback (most recent call last):\n"
            + '  File "agent.py", line 3\n' * 20
            + "ValueError: no"
        )
        outcome = {
            **identity,
            "outcome": "failed",
            "reason": "timeout",
            "detail": detail,
            "partial": None,
        }
    body = json.dumps(outcome).encode()
    purpose = "eval" if is_eval else "train"
    yield (
        "INSERT INTO sessions VALUES (?,?,?,?,?,0,?,?,?,?,?,?,?,'',?,NULL)",
        (
            session_id,
            hashlib.sha256(session_id.encode()).digest(),
            task_id,
            group_id,
            index,
            purpose,
            b'{"temperature":1.0,"top_p":1.0,"max_new_tokens":512}',
            opened,
            "aborted" if fails else "finished",
            None if fails else reward,
            b"{}",
            body,
            b"{}",
        ),
    )
    parent = None
    for turn in range(TURNS):
        turn_id = f"turn-{number:018x}{turn}"
        yield (
            "INSERT INTO turns (id, session_id, parent_id, context_ids, sampled_ids, logprobs, spans, "
            "finish_reason, request_digest, delivered, temperature, prompt_tokens, cached_tokens, "
            "fork_reason, started_at, finished_at, constrained, grammar, messages, tools) "
            "VALUES (?,?,?,?,?,?,?,'stop','',1,1.0,300,200,'',?,?,0,'',?,?)",
            (
                turn_id,
                session_id,
                parent,
                _ids(random, 200 if parent is None else 60),
                _ids(random, TOKENS),
                np.full(TOKENS, -random.random(), np.float32).tobytes(),
                json.dumps(
                    [{"version": max(0, step - 1), "start": 0, "end": TOKENS}]
                ).encode(),
                opened + turn,
                opened + turn + 1,
                json.dumps(
                    [_message("user", random), _message("assistant", random)]
                ).encode(),
                b"none",
            ),
        )
        parent = turn_id
    if is_eval:
        return
    yield (
        "INSERT INTO outbox (session_id, failed, outcome) VALUES (?,?,?)",
        (session_id, fails, body),
    )
    states: list[tuple[str, str | None, str | None, int | None, str]] = [
        ("in_flight", None, None, None, "")
    ]
    if fails:
        states.append(("dropped", "replaced", "timeout", None, session_id))
    else:
        states.append(("finished", None, None, None, session_id))
        if dropped:
            states.append(("dropped", dropped, None, None, ""))
        else:
            states.append(("grouped", None, None, None, ""))
            states.append(("taken", None, None, step - 1, ""))
            states.append(("trained", None, None, step - 1, ""))
    for place, (state, reason, failure, batch, named) in enumerate(states):
        sql = "INSERT INTO ledger VALUES (1,?,?,?,0,?,?,?,?,'',?,?,?)"
        values = (
            number * 5 + place,
            group_id,
            index,
            task_id,
            state,
            reason,
            failure,
            batch,
            named,
            opened,
        )
        yield sql, values


def _ids(random: Random, count: int) -> bytes:
    return (
        np.frombuffer(random.randbytes(count * 2), np.uint16).astype(np.int32).tobytes()
    )


def _message(role: str, random: Random) -> dict[str, Any]:
    """Words as frequent as those of a language."""
    words = " ".join(
        f"w{min(int(random.paretovariate(0.7)) - 1, 19_999)}" for _ in range(WORDS)
    )
    return {"role": role, "content": words}


# ----------------------------------------------------------------- a live run


def live_cost(folder: RunFolder, cache: Path, seconds: int) -> dict[str, Any]:
    """What the viewer costs while rollouts are appended, beside the same without it, in
    turns."""
    part_s = max(10, seconds // 4)
    first = (
        sqlite3.connect(folder.store_path)
        .execute("SELECT COUNT(*) FROM sessions")
        .fetchone()[0]
    )
    commits: dict[str, list[float]] = {"alone": [], "viewed": []}
    cpu_s = 0.0
    read_bytes = 0
    viewed_s = 0.0
    with connect_live(folder) as writer:
        for part in range(4):
            if part % 2 == 0:
                commits["alone"] += writer.append(first, part_s)
            else:
                with Viewer(folder.path, cache) as viewer:
                    viewer.wait_until(lambda state: state["ready"])
                    until = threading.Event()
                    viewer.follow(until)
                    process = psutil.Process(viewer.pid)
                    before = process.cpu_times()
                    io_before = process.io_counters()
                    started = time.monotonic()
                    commits["viewed"] += writer.append(first, part_s)
                    after = process.cpu_times()
                    io_after = process.io_counters()
                    viewed_s += time.monotonic() - started
                    cpu_s += after.user + after.system - before.user - before.system
                    read_bytes += io_after.read_chars - io_before.read_chars
                    until.set()
            first += part_s * LIVE_RATE
    alone = median(commits["alone"])
    viewed = median(commits["viewed"])
    return {
        "rollouts_per_s": LIVE_RATE,
        "viewer_cpu_s_per_s": round(cpu_s / viewed_s, 4),
        "viewer_read_kb_per_s": round(read_bytes / viewed_s / 1e3, 1),
        "writer_ms_per_rollout_alone": round(1e3 * alone, 3),
        "writer_ms_per_rollout_viewed": round(1e3 * viewed, 3),
        "writer_busy_share_alone": round(sum(commits["alone"]) / (2 * part_s), 5),
        "writer_busy_share_viewed": round(sum(commits["viewed"]) / (2 * part_s), 5),
        "step_time_cost": round(
            (sum(commits["viewed"]) - sum(commits["alone"])) / (2 * part_s), 5
        ),
    }


class connect_live:
    """The store of a live run: a connection stays open, so that its log stays too."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._random = Random(1)

    def __enter__(self) -> connect_live:
        self._db = connect(self._folder.store_path)
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def append(self, first: int, seconds: int) -> list[float]:
        """Seconds that the transactions of each rollout took."""
        taken: list[float] = []
        started = time.monotonic()
        for number in range(seconds * LIVE_RATE):
            time.sleep(max(0.0, started + number / LIVE_RATE - time.monotonic()))
            work = list(statements(first + number, self._random))
            begun = time.monotonic()
            for sql, values in work:  # each is committed, as gateway and buffer do
                self._db.execute(sql, values)
            taken.append(time.monotonic() - begun)
        return taken


if __name__ == "__main__":
    sys.exit(main())
