"""What a bench leaves behind: its result as JSON, a line of the history, a verdict for
each ratio."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.ratios import Entry, append_history, falls, missed, read_history

RESULTS = Path(__file__).parent / "results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What all benches take about their results."""
    parser.add_argument(
        "--results",
        type=Path,
        help="folder of the history (not with --smoke: benchmarks/results)",
    )
    parser.add_argument(
        "--baseline", action="store_true", help="write the baseline there as well"
    )
    parser.add_argument("--out", type=Path, help="the result as JSON")


def keep(
    ratios: Mapping[str, float],
    targets: Mapping[str, float],
    details: Mapping[str, Any],
    *,
    options: argparse.Namespace,
    model: str,
    baseline: str,
    load_before: float,
) -> int:
    """Prints and writes everything; 1 if a ratio fell. A run without `options.results`
    leaves no history."""
    now = entry(model, ratios)
    fell = falls(
        now, read_history(options.results / "history.jsonl") if options.results else []
    )
    result = {
        **asdict(now),
        "load_before": load_before,
        "repetitions": options.repetitions,
        "ratios": ratios,
        "targets": targets,
        "missed": missed(ratios, targets),
        **details,
        "fell": [asdict(one) for one in fell],
    }
    text = json.dumps(result, indent=2) + "\n"
    if options.results:
        append_history(options.results / "history.jsonl", now)
        if options.baseline:
            (options.results / baseline).write_text(text)
    if options.out:
        options.out.write_text(text)
    print(text, end="")
    for name, value in ratios.items():
        verdict = "  MISSED" if name in result["missed"] else ""
        print(f"{name:<18}{value:6.3f}   target {targets[name]:.2f}{verdict}")
    for one in fell:
        print(f"FELL: {one}", file=sys.stderr)
    return 1 if fell else 0


def entry(model: str, ratios: Mapping[str, float]) -> Entry:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+"]
    commit = subprocess.run(
        git, capture_output=True, text=True, check=False
    ).stdout.strip()
    names = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    cpu = names[0].partition(":")[2].strip() if names else "unknown CPU"
    return Entry(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        machine=f"{os.cpu_count()} x {cpu}",
        model=model,
        ratios=ratios,
    )
