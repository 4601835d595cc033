"""The test suite as `launch/test.sh` runs it: two halves that take equally long, and what they came to.

python tests/suite.py half 0|1 [--all]            the files and folders of a half, one a line
python tests/suite.py summary [--record] XML ...  counts and the slowest tests of JUnit reports; `--record`
                                                  writes them to `tests/suite.json`, which the halves are
                                                  made from
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
RECORD = TESTS / "suite.json"
TOGETHER = ("tests/e2e",)
"""Folders whose files share a run, which each half would have to make for itself."""
_UNKNOWN_S = 5.0
"""Of a file that no record has."""
_NUM_RECORDED = 50
_NUM_PRINTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    file: str
    name: str
    seconds: float
    state: str
    """passed, failed or skipped."""
    is_slow: bool
    """It has the mark `slow`, so only `--all` runs it."""


def halves(seconds_by_part: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """The parts, the longest first, each in the half that is shorter so far."""
    parts: tuple[list[str], list[str]] = ([], [])
    seconds = [0.0, 0.0]
    for part in sorted(seconds_by_part, key=lambda name: (-seconds_by_part[name], name)):
        shorter = seconds.index(min(seconds))
        parts[shorter].append(part)
        seconds[shorter] += seconds_by_part[part]
    return parts


def parts_of_suite(recorded: Mapping[str, Mapping[str, float]], *, with_slow: bool) -> dict[str, float]:
    """Seconds of every file of tests that there is, or of a folder whose files stay together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        part = next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)
        known = recorded.get(file)
        if known is None:
            seconds[part] += _UNKNOWN_S
        else:
            seconds[part] += known["quick"] + (known["slow"] if with_slow else 0.0)
    return dict(seconds)


def read_reports(reports: Sequence[Path]) -> list[Result]:
    """The tests of JUnit reports, as pytest writes them."""
    results: list[Result] = []
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            state = "passed"
            if case.find("failure") is not None or case.find("error") is not None:
                state = "failed"
            elif case.find("skipped") is not None:
                state = "skipped"
            names = {entry.get("name") for entry in case.iter("property")}
            results.append(
                Result(
                    file=_file_of(case.get("classname", "")),
                    name=case.get("name", ""),
                    seconds=float(case.get("time", "0")),
                    state=state,
                    is_slow="slow" in names,
                )
            )
    return results


def _file_of(class_name: str) -> str:
    """`tests.unit.test_x` or `tests.unit.test_x.TestY` -> `tests/unit/test_x.py`."""
    words = class_name.split(".")
    while len(words) > 1 and not words[-1].startswith("test_"):
        words.pop()
    return "/".join(words) + ".py"


def summary(results: Sequence[Result]) -> dict[str, Any]:
    seconds: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"quick": 0.0, "slow": 0.0})
    for result in results:
        seconds[result.file]["slow" if result.is_slow else "quick"] += result.seconds
    slowest = sorted(results, key=lambda result: -result.seconds)[:_NUM_RECORDED]
    return {
        "commit": _commit(),
        "counts": dict(Counter(result.state for result in results)),
        "slow_tests": sum(result.is_slow for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "slowest": {f"{result.file}::{result.name}": round(result.seconds, 1) for result in slowest},
        "seconds_by_file": {
            file: {kind: round(value, 1) for kind, value in parts.items()}
            for file, parts in sorted(seconds.items())
        },
    }


def _commit() -> str:
    command = ["git", "-C", str(TESTS.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _recorded() -> dict[str, Mapping[str, float]]:
    if not RECORD.exists():
        return {}
    return json.loads(RECORD.read_text())["seconds_by_file"]


def _print_summary(found: Mapping[str, Any]) -> None:
    print(f"\nThe slowest {_NUM_PRINTED} tests, in seconds:")
    for name, seconds in list(found["slowest"].items())[:_NUM_PRINTED]:
        print(f"{seconds:8.1f}  {name}")
    counts = found["counts"]
    states = ", ".join(f"{counts.get(state, 0)} {state}" for state in ("passed", "failed", "skipped"))
    print(f"{states} at {found['commit']}, {found['seconds'] / 60:.1f} minutes of tests in two processes")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    half = commands.add_parser("half")
    half.add_argument("number", type=int, choices=(0, 1))
    half.add_argument("--all", action="store_true")
    summarise = commands.add_parser("summary")
    summarise.add_argument("--record", action="store_true")
    summarise.add_argument("reports", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "half":
        parts = parts_of_suite(_recorded(), with_slow=options.all)
        print("\n".join(sorted(halves(parts)[options.number])))  # in pytest's own order
        return 0
    found = summary(read_reports(options.reports))
    if options.record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    _print_summary(found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
