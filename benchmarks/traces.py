"""What OpenTelemetry costs a turn: CPU-seconds of its spans, and their share of a step.

    python -m benchmarks.traces RUN [--turns 2000]

A turn has four spans in the gateway, three in the driver and about ten in the engine.
They are made and sent by OTLP over HTTP to a collector in another process, whose time
does not count. CPU-seconds are of the whole process, so with the thread that sends. RUN
is the folder of a run with the real turns and steps; of an engine the price is that of
as many spans of ours, not that of SGLang's own code.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from invrl.host.output.traces import SpanPlace, Traces, child_span, current_traceparent

ENGINE_SPANS = 10
REPEATS = 5
COLLECTOR = """
import sys
from trace_collector import running_collector
with running_collector() as collector:
    print(collector.url, flush=True)
    sys.stdin.read()
    print(len(collector.spans), flush=True)
"""


def in_gateway(traces: Traces) -> SpanPlace | None:
    with traces.call("agent_call", "", {"invrl.session": "ses-0123456789abcdef"}):
        attributes = {
            "invrl.turn": "turn-0123456789",
            "invrl.session": "ses-0",
            "invrl.prompt_tokens": 300,
        }
        with child_span("turn", attributes) as place:
            with child_span("generate"):
                pass
            with child_span("commit", {"invrl.sampled_tokens": 40}):
                pass
        assert current_traceparent()
    return place


def in_driver(traces: Traces, parent: SpanPlace) -> None:
    attributes = {"invrl.turn": "turn-0123456789", "invrl.step": 1, "invrl.batch": 1}
    for name in ("batch", "train_step", "weight_version"):
        parent = traces.past_span(
            name, parent, start=1.0, end=2.0, attributes=attributes
        )


def in_engine(traces: Traces) -> None:
    for _ in range(ENGINE_SPANS):
        traces.past_span(
            "stage",
            None,
            start=1.0,
            end=2.0,
            attributes={"tp_rank": 0, "pid": 1, "host_id": "h"},
        )


def cpu_seconds(url: str, turns: int, work: Callable[[Traces], object]) -> float:
    """Of one turn's spans, sent."""
    traces = Traces(f"{url}/v1/traces", service="bench", run="bench")
    began = time.process_time()
    for number in range(turns):
        work(traces)
        if number % 200 == 199:
            time.sleep(0.05)  # as in a run: the queue is never full
    traces.close(deadline_s=60.0)
    return (time.process_time() - began) / turns


def of_run(folder: Path) -> tuple[float, float]:
    """Turns in a step, and seconds of a step, of a run that has ended."""
    rows = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    with contextlib.closing(
        sqlite3.connect(f"file:{folder / 'run.sqlite'}?immutable=1", uri=True)
    ) as store:
        (turns,) = store.execute("SELECT COUNT(*) FROM turns").fetchone()
    return turns / len(seconds), median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--turns", type=int, default=2000)
    arguments = parser.parse_args()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    collector = subprocess.Popen(
        [sys.executable, "-c", COLLECTOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert collector.stdout is not None
    url = collector.stdout.readline().strip()
    parent = SpanPlace("1" * 32, "2" * 16)
    works: dict[str, Callable[[Traces], object]] = {
        "gateway": in_gateway,
        "driver": lambda traces: in_driver(traces, parent),
        "engine": in_engine,
    }
    total = 0.0
    for name, work in works.items():
        costs = [cpu_seconds(url, arguments.turns, work) for _ in range(REPEATS)]
        middle, least, most = (
            1e3 * value for value in (median(costs), min(costs), max(costs))
        )
        print(f"{name}: {middle:.3f} ms of CPU a turn ({least:.3f} to {most:.3f})")
        total += middle
    received, _ = collector.communicate()
    sent = REPEATS * arguments.turns * (4 + 3 + ENGINE_SPANS)
    print(f"{int(received):,} of {sent:,} spans arrived")
    turns, seconds = of_run(arguments.run)
    share = total / 1e3 * turns / seconds
    print(
        f"all: {total:.3f} ms a turn; {turns:.1f} turns in a step of {seconds:.2f} s: {share:.2%}"
    )


if __name__ == "__main__":
    main()
