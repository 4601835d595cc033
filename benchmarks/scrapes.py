"""What a scrape of a run's metrics costs the run.

    python -m benchmarks.scrapes PID URL [--seconds 15] [--pairs 3] [--per-second 4]

PID: of `invrl train` that works, URL: where it shows its metrics. Spans with scrapes
and spans without take turns. The cost is what the driver and the gateway's processes
used more with scrapes than without, in CPU seconds per scrape; the other processes of a
run have no part in it. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from statistics import median

import psutil

from benchmarks.live_run import process_role

ROLES = ("driver", "gateway")
INTERVALS_S = (5, 15)


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds so far of the driver and of the gateway below this process."""
    seconds: dict[str, float] = dict.fromkeys(ROLES, 0.0)
    for process in psutil.Process(pid).children(recursive=True):
        try:
            role = process_role(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        if role in seconds:
            seconds[role] += times.user + times.system
    return seconds


def span(
    pid: int, seconds: float, *, url: str = "", per_second: float = 1.0
) -> tuple[dict[str, float], list[float]]:
    """CPU seconds of a span, by role, and how long each scrape took. Without `url`: no
    scrape."""
    before = cpu_s(pid)
    ends_at = time.monotonic() + seconds
    took_s: list[float] = []
    while (began := time.monotonic()) < ends_at:
        if url:
            with urllib.request.urlopen(url, timeout=20) as answer:
                answer.read()
            took_s.append(time.monotonic() - began)
        time.sleep(max(0.0, 1 / per_second - (time.monotonic() - began)))
    after = cpu_s(pid)
    return {role: after[role] - before[role] for role in ROLES}, took_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("pid", type=int)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--per-second", type=float, default=4)
    settings = parser.parse_args(arguments)
    cost_s = dict.fromkeys(ROLES, 0.0)
    took_s: list[float] = []
    for _ in range(settings.pairs):
        alone, _ = span(settings.pid, settings.seconds)
        scraped, took = span(
            settings.pid,
            settings.seconds,
            url=settings.url,
            per_second=settings.per_second,
        )
        took_s += took
        for role in ROLES:
            cost_s[role] += scraped[role] - alone[role]
        print({"alone": alone, "scraped": scraped}, file=sys.stderr)
    per_scrape = {role: seconds / len(took_s) for role, seconds in cost_s.items()}
    total = sum(per_scrape.values())
    print(
        json.dumps(
            {
                "scrapes": len(took_s),
                "cpu_s_per_scrape": {
                    role: round(seconds, 5) for role, seconds in per_scrape.items()
                },
                "median_s": round(median(took_s), 4),
                "slowest_s": round(max(took_s), 4),
                "share_of_a_core": {
                    f"every {interval} s": round(total / interval, 5)
                    for interval in INTERVALS_S
                },
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
