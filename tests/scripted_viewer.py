"""A made-up run, served as `invrl view` serves one: tests write its values and read
what the page asks.

Every text that a model, a task or a tool can write is hostile here. If any of it became
markup, `HOSTILE` would change the page's title, call another host or hide the page.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = Path(__file__).parents[1] / "invrl" / "viewer" / "page"
HOSTILE = (
    "<script>document.title='taken'</script><style>body{display:none}</style>"
    '<link rel=stylesheet href="http://elsewhere.test/x.css"><img src="http://elsewhere.test/x.png" '
    "onerror=\"document.title='taken'\"><b id=taken>bold</b>"
)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_START = 1_795_640_000.0


def run_value(run: str, step: int = 8, state: str = "ended") -> dict[str, Any]:
    index = {
        "rollouts_indexed": 240,
        "rollouts": 240,
        "turns_indexed": 480,
        "turns": 480,
        "ready": True,
        "error": "",
    }
    return {
        "id": run,
        "name": run,
        "path": f"/runs/{run}",
        "state": state,
        "started_at": _START,
        "last_at": _START + 300,
        "step": step,
        "num_steps": 8,
        "phase": "rollout",
        "incarnations": 2,
        "index": index,
        "has": {},
        "outcome": f"training reward: 0.250 at step 1 → 0.875 at step 8; ended after step 8 of 8 {HOSTILE}",
        "log_end": f"{HOSTILE}</pre></body>",
        "notes": [f"half a line {HOSTILE}"],
    }


def row_value(number: int) -> dict[str, Any]:
    failed = number % 17 == 5
    return {
        "session_id": f"s-{number:04d}",
        "task_id": f"{HOSTILE} {number % 9}@{number // 9}",
        "task": f"{HOSTILE} {number % 9}",
        "group_id": f"g-{number // 8}",
        "index": number % 8,
        "attempt": 0,
        "purpose": "eval" if number % 5 == 0 else "train",
        "evaluation": "sampled" if number % 5 == 0 else "",
        "step": number // 30 + 1,
        "state": "failed" if failed else "trained",
        "reason": None,
        "failure": "agent" if failed else None,
        "detail": HOSTILE if failed else "",
        "reward": None if failed else float(number % 3 == 0),
        "components": {"exact": float(number % 3 == 0)},
        "turns": 3,
        "sampled_tokens": 10 + number % 50,
        "truncated": number % 11 == 0,
        "forks": 1,
        "fork_reasons": {"edited_history": 1},
        "oldest_version": 1,
        "newest_version": 2,
        "staleness": number % 3,
        "opened_at": _START + number,
        "seconds": 1.5,
        "advantage": 0.5 - number % 2,
        "logprob": -0.7,
        "gap": 0.01,
        "surprise": (number % 7) / 3,
    }


ROWS = [row_value(number) for number in range(240)]


def _message(
    role: str, content: str, calls: list[dict[str, str]] | None = None
) -> dict[str, Any]:
    return {
        "role": role,
        "content": content,
        "reasoning": "",
        "tool_calls": calls or [],
        "tool_call_id": "",
        "instructions": False,
        "characters": len(content),
        "cut": False,
    }


def _turn(
    number: int, parent: int | None, messages: list[dict[str, Any]], fork: str = ""
) -> dict[str, Any]:
    call = {
        "id": HOSTILE,
        "name": "calculate",
        "arguments": json.dumps({"expression": HOSTILE}),
    }
    return {
        "id": f"t-{number}",
        "session_id": "s",
        "parent_id": None if parent is None else f"t-{parent}",
        "fork_reason": fork,
        "fork_advice": f"Send it as it was {HOSTILE}" if fork else "",
        "messages": messages,
        "fork": None,
        "restarts": parent is None,
        "reply": _message("assistant", f"reply {number} {HOSTILE}", [call]),
        "tools": 0,
        "finish_reason": "stop" if number else "length",
        "spans": [
            {"version": 1, "start": 0, "end": 4},
            {"version": 2, "start": 4, "end": 8},
        ],
        "delivered": True,
        "trained": number != 1,
        "why_not_trained": "a later branch has it" if number == 1 else "",
        "temperature": 1.0,
        "cached_tokens": 2,
        "context_tokens": 6,
        "sampled_tokens": 8,
        "started_at": _START,
        "finished_at": _START + 1,
        "constrained": False,
        "logprob_mean": -0.5,
        "reward": None,
        "numbers": {},
        "segments": [
            {"engine": f"engine-0 {HOSTILE}", "start": 0, "end": 4},
            {"engine": None, "start": 4, "end": 8},
        ],
    }


def detail_value(session_id: str) -> dict[str, Any]:
    row = next(row for row in ROWS if row["session_id"] == session_id)
    first = [
        _message("system", f"You calculate. {HOSTILE}"),
        _message("user", f"What is 2 * 3? {HOSTILE}"),
    ]
    turns = [
        _turn(0, None, first),
        _turn(1, 0, [_message("tool", f"6 {HOSTILE}")]),
        _turn(
            2, None, [*first, _message("user", f"Again. {HOSTILE}")], "edited_history"
        ),
    ]
    change = {"message": 2, "role": "assistant", "part": "content"}
    change |= {"recorded": f"reply 0 {HOSTILE}", "sent": f"reply 1\n{HOSTILE}"}
    what = f"Message 3 (assistant): another text {HOSTILE}"
    turns[2]["fork"] = {
        "from_turn": "t-0",
        "shared": 2,
        "messages": 3,
        "what": what,
        "change": change,
    }
    traceback = (
        f'Traceback (most recent call last):\n  File "agent.py"\nValueError: {HOSTILE}'
    )
    step = {
        "incarnation": 0,
        "at": _START,
        "reason": None,
        "failure": None,
        "detail": "",
        "batch_id": 1,
        "step": 1,
    }
    ledger = [
        {**step, "sequence": 1, "state": "finished", "lost": False},
        {
            **step,
            "sequence": 2,
            "state": row["state"],
            "lost": False,
            "failure": row["failure"],
            "detail": traceback,
        },
    ]
    members = [other for other in ROWS if other["group_id"] == row["group_id"]]
    group = [
        {
            key: other[key]
            for key in ("session_id", "index", "attempt", "reward", "state")
        }
        for other in members
    ]
    return {
        "row": row,
        "detail": traceback if row["failure"] else "",
        "numbers": {"loss": 0.5},
        "sampling": {"temperature": 1.0},
        "limits": None,
        "rewards": [],
        "ledger": ledger,
        "children": [],
        "group": group,
        "turns": turns,
        "notes": [],
        "tool_lists": [
            [{"name": "calculate", "description": HOSTILE, "parameters": "{}"}]
        ],
    }


def tokens_value(turn_id: str) -> dict[str, Any]:
    texts = [
        "The",
        " answer",
        "\n",
        "<script>",
        "document.title='taken'",
        "</script>",
        " 6",
        "<|im_end|>",
    ]
    return {
        "turn_id": turn_id,
        "session_id": "s",
        "step": 1,
        "context": {
            "total": 6,
            "start": 0,
            "ids": [1, 2, 3, 4, 5, 6],
            "texts": ["a", "b", "<b>", "c", "d", "e"],
        },
        "sampled": {
            "ids": list(range(8)),
            "texts": texts,
            "logprobs": [-0.1 * (at + 1) for at in range(8)],
            "versions": [1] * 4 + [2] * 4,
            "trained": [True] * 7 + [False],
            "advantages": [0.5 - 0.1 * at for at in range(7)] + [0.0],
            "trainer_logprobs": [-0.1 * (at + 1) + 0.01 for at in range(7)] + [None],
            "candidates": {
                "ids": [[at, 90] for at in range(7)] + [[]],
                "logprobs": [[-0.1 * (at + 1), -3.0] for at in range(7)] + [[]],
                "texts": {
                    **{str(at): text for at, text in enumerate(texts)},
                    "90": HOSTILE,
                },
                "recorded": 50,
                "shown": 20,
            },
            "numbers": {"kl": [0.1] * 8},
        },
        "notes": [],
    }


def _facets(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def counts(values: list[Any]) -> dict[str, int]:
        return {
            str(value): values.count(value)
            for value in dict.fromkeys(values)
            if value not in (None, "")
        }

    facets = {
        name: counts([row[name] for row in rows])
        for name in ("purpose", "evaluation", "state", "failure")
    }
    ranges = {
        "reward": [0, 1],
        "tokens": [10, 59],
        "turns": [3, 3],
        "staleness": [0, 2],
        "seconds": None,
    }
    return {
        **facets,
        "total": len(rows),
        "drop": {"stale": 3},
        "fork": {"edited_history": len(rows)},
        "truncated": {"0": 200, "1": 40},
        "trained": {"1": 200},
        "components": ["exact"],
        "ranges": ranges,
    }


class ScriptedViewer:
    """Serves the page and a made-up run until it is left.

    `questions` holds the path and query of every question to the API; `send` tells the
    page what changed.
    """

    def __init__(self, runs: tuple[str, ...] = ("first", "second")) -> None:
        self.runs = [run_value(run) for run in runs]
        self.questions: list[tuple[str, dict[str, list[str]]]] = []
        self.metric_rows = {
            run: self._metrics(number) for number, run in enumerate(runs)
        }
        self.fail: dict[str, str] = {}
        self._news: list[str] = []
        self._ending = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._http.serve_forever,
            kwargs={"poll_interval": 0.01},
            daemon=True,
        )

    def __enter__(self) -> ScriptedViewer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._http.shutdown()
        self._http.server_close()

    def send(self, run: str, *kinds: str) -> None:
        self._news.append(json.dumps({"run": run, "kinds": kinds}))

    @staticmethod
    def _metrics(number: int) -> dict[str, list[list[float]]]:
        names = [
            "rollout/reward_mean",
            "train/approx_kl",
            "time/train_s",
            "time/rollout_s",
            "eval/sampled/reward_mean",
        ]
        names += [
            "eval/sampled/reward_mean_low",
            "eval/sampled/reward_mean_high",
            HOSTILE,
        ]
        return {
            name: [[s, _START + 10 * s, 0.1 * s + number * 0.2] for s in range(1, 9)]
            for name in names
        }

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = urlsplit(request.path).path
        query = parse_qs(urlsplit(request.path).query)
        if path == "/api/events":
            self._stream(request)
        elif path == "/data/manifest.js":
            self._reply(request, 200, "text/javascript", b"window.invrlExport = null;")
        elif path.startswith("/api/"):
            name = unquote(path.removeprefix("/api/"))
            self.questions.append((name, query))
            if name in self.fail:
                error = {
                    "error": {"message": self.fail[name], "fix": HOSTILE, "reason": ""}
                }
                self._reply(
                    request, 503, "application/json", json.dumps(error).encode()
                )
                return
            value = self.value(name, {key: values[0] for key, values in query.items()})
            self._reply(request, 200, "application/json", json.dumps(value).encode())
        else:
            file = PAGE / (path.lstrip("/") or "index.html")
            if file.is_file():
                self._reply(
                    request,
                    200,
                    _TYPES.get(file.suffix, "text/plain"),
                    file.read_bytes(),
                )
            else:
                self._reply(request, 404, "text/plain", b"")

    def value(self, name: str, query: dict[str, str]) -> Any:
        """What `/api/NAME` answers, in the shapes that docs/reference says."""
        if name == "runs":
            return {"runs": self.runs, "version": "0"}
        if name == "config":
            runs = {
                run["id"]: {"algorithm": {"name": HOSTILE, "lr": number}}
                for number, run in enumerate(self.runs)
            }
            values = {run: section["algorithm"]["lr"] for run, section in runs.items()}
            return {
                "runs": runs,
                "differences": [{"key": "algorithm.lr", "values": values}],
                "changed": {
                    run: [{"key": HOSTILE, "value": HOSTILE, "default": HOSTILE}]
                    for run in runs
                },
            }
        if name == "metric-names":
            names = sorted(
                {name for rows in self.metric_rows.values() for name in rows}
                | {f"many/{n:05d}" for n in range(10_000)}
            )
            text = query.get("q", "")
            runs = [run["id"] for run in self.runs]
            return {
                "names": [
                    {"name": n, "runs": runs, "last": 1.0} for n in names if text in n
                ]
            }
        if name == "metrics":
            return {"runs": self.metric_rows}
        kind, _, rest = name.removeprefix("runs/").partition("/")[2].partition("/")
        if kind == "rollouts" and rest:
            return detail_value(rest)
        if kind == "turns":
            return tokens_value(rest.removesuffix("/tokens"))
        if kind == "replies":
            texts = {
                row["session_id"]: f"said {HOSTILE * 9}"
                for row in ROWS
                if row["task"] == rest
            }
            return {
                "replies": {
                    name: {"text": text, "characters": 9_000}
                    for name, text in texts.items()
                }
            }
        if kind in ("rollouts", "facets"):
            rows = self._passing(query)
            offset = int(query.get("offset", 0))
            limit = int(query.get("limit", 50))
            found = {
                "total": len(rows),
                "rows": rows[offset : offset + limit],
                "searched": None,
            }
            return found if kind == "rollouts" else _facets(rows)
        return getattr(self, f"_{kind}")()

    @staticmethod
    def _passing(query: dict[str, str]) -> list[dict[str, Any]]:
        exact = {"step", "state", "purpose", "failure", "task", "evaluation"}
        keys = {name: value for name, value in query.items() if name in exact}
        rows = [
            row
            for row in ROWS
            if all(str(row[name]) == value for name, value in keys.items())
        ]
        rows = [row for row in rows if query.get("group") in (None, row["group_id"])]
        low = query.get("min_reward")
        return [
            row
            for row in rows
            if low is None
            or (row["reward"] is not None and row["reward"] >= float(low))
        ]

    def _steps(self) -> dict[str, Any]:
        step = {
            "groups": 4,
            "rollouts": 30,
            "sampled_tokens": 900,
            "truncated": 1,
            "reward_mean": 0.4,
            "reward_min": 0.0,
            "reward_max": 1.0,
            "reward_std": 0.5,
            "staleness_max": 1,
            "seconds_mean": 1.5,
            "first_at": _START,
            "last_at": _START,
        }
        score = {
            "step": 8,
            "evaluation": "sampled",
            "rollouts": 48,
            "failed": 1,
            "reward_mean": 0.5,
        }
        return {
            "steps": [{"step": number, **step} for number in range(1, 9)],
            "evaluations": [score],
        }

    def _groups(self) -> dict[str, Any]:
        group = {
            "group_id": "g-1",
            "task_id": HOSTILE,
            "task": HOSTILE,
            "purpose": "train",
            "evaluation": "",
            "step": 1,
            "rollouts": 8,
            "trained": 7,
            "dropped": 1,
            "failed": 0,
            "truncated": 0,
            "reasons": [HOSTILE],
            "reward_mean": 0.5,
            "reward_min": 0.0,
            "reward_max": 1.0,
            "reward_std": 0.5,
            "sampled_tokens": 100,
            "oldest_version": 1,
            "opened_at": _START,
        }
        return {"total": 1, "rows": [group]}

    def _tasks(self) -> dict[str, Any]:
        task = {
            "task": ROWS[0]["task"],
            "rollouts": 27,
            "trained": 20,
            "failed": 1,
            "purposes": ["train"],
            "reward_mean": 0.5,
            "reward_min": 0.0,
            "reward_max": 1.0,
            "reward_first": 0.2,
            "reward_last": 0.9,
            "gain": 0.7,
            "first_step": 1,
            "last_step": 8,
        }
        return {"total": 1, "rows": [task]}

    def _ledger(self) -> dict[str, Any]:
        lives = [
            {
                "number": n,
                "parent": n - 1,
                "step": 4 * n,
                "sequence": 9,
                "started_at": _START,
                "lost": n,
            }
            for n in (0, 1)
        ]
        counts = [
            {"state": "trained", "reason": None, "failure": None, "count": 225},
            {"state": "failed", "reason": None, "failure": "agent", "count": 15},
        ]
        failure = {
            "failure": "agent",
            "line": HOSTILE,
            "detail": f"Traceback\n{HOSTILE}",
            "count": 15,
            "session_ids": ["s-0005"],
        }
        return {
            "incarnations": lives,
            "counts": counts,
            "lineage": "ok",
            "failures": [failure],
        }

    def _evaluations(self) -> dict[str, Any]:
        def score(step: int, mean: float) -> dict[str, Any]:
            bounds = {"reward_mean_low": mean - 0.1, "reward_mean_high": mean + 0.1}
            accuracy = {"accuracy": mean, "accuracy_low": None, "accuracy_high": None}
            pass_at = {str(k): [min(1.0, mean * k**0.5), None, None] for k in (1, 2, 4)}
            named = {
                "step": step,
                "name": "sampled",
                "samples": 48,
                "failed": 0,
                "reward_mean": mean,
            }
            return {**named, **bounds, **accuracy, "pass_at": pass_at}

        by_step = {"0": [0.0, None, 0.0, 1.0], "8": [1.0, 1.0, 1.0, 0.0]}
        rows = [
            {
                "task_id": f"{HOSTILE} {n}",
                "name": "sampled",
                "by_step": by_step,
                "gain": 0.5,
            }
            for n in range(20)
        ]
        gain = {"gain": 0.5, "gain_low": 0.375, "gain_high": 0.625, "tasks": 20}
        first, last = score(0, 0.3), score(8, 0.8)
        return {
            "scores": [first, score(4, 0.5), last],
            "gains": [{"name": HOSTILE, "first": first, "last": last, **gain}],
            "tasks": {"total": 20, "rows": rows},
        }

    def _weights(self) -> dict[str, Any]:
        seconds = {"stage_s": 0.2, "load_s": 0.4, "pause_s": 0.1}
        updates = [
            {
                "step": n,
                "time": _START + n,
                "version": n,
                "bytes": 2.0**28,
                "seconds": seconds,
                "canary_max_gap": 0.01,
                "canary_mean_gap": 0.001,
            }
            for n in range(1, 9)
        ]
        return {
            "updates": updates,
            "engines": {"fleet/engines": [[1, 0.0, 2.0]]},
        }

    def _timeline(self) -> dict[str, Any]:
        spans = []
        for step in range(1, 9):
            at = _START + 30 * step
            for lane, name, start, end, waits in (
                ("driver", "rollout", 0, 15, "rollouts"),
                ("rollout", "rollout", 0, 14, ""),
                ("driver", "train", 15, 25, "trainer"),
                ("trainer", "train", 15, 25, ""),
                ("sync", "sync", 25, 28, ""),
            ):
                spans.append(
                    {
                        "lane": lane,
                        "name": name,
                        "step": step,
                        "start": at + start,
                        "end": at + end,
                        "waits_for": waits,
                        "parts": {"forward": 1.0},
                    }
                )
        starts = [{"time": _START + 120, "pid": 1, "step": 4, "restart": True}]

        def sample(number: int) -> dict[str, Any]:
            engine = {
                "name": "engine-0",
                "running": number % 7,
                "waiting": number % 3,
                "kv_use": 0.4,
                "cache_hit_rate": 0.9,
                "tokens_per_s": 300.0,
            }
            gateway = {
                "requests": 9,
                "latency_p50_s": 0.2,
                "latency_p95_s": 0.6,
                "loop_lag_s": 0.001,
            }
            return {
                "time": _START + 3 * number,
                "engines": [engine],
                "gateway": gateway,
                "memory": {"driver": 2**30, "engine-0": 2**31},
            }

        return {
            "starts": starts,
            "spans": spans,
            "samples": [sample(number) for number in range(80)],
            "now": None,
        }

    def _stream(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        sent = len(self._news)
        try:
            while not self._ending.is_set():
                for news in self._news[sent:]:
                    request.wfile.write(f"event: change\ndata: {news}\n\n".encode())
                    sent += 1
                request.wfile.flush()
                time.sleep(0.05)
        except OSError:
            return  # The page closed its stream.

    @staticmethod
    def _reply(
        request: BaseHTTPRequestHandler, status: int, kind: str, body: bytes
    ) -> None:
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Security-Policy", POLICY)
        request.send_header("X-Content-Type-Options", "nosniff")
        request.end_headers()
        request.wfile.write(body)
