"""The test suite as `launch/test.sh` runs it: workers side by side that take equally
long, what they do meanwhile, and what they came to.

python tests/suite.py        the quick tests
python tests/suite.py --all  all tests; writes `tests/suite.json`, by which the workers' shares are balanced
python tests/suite.py --workers N  with so many workers
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import pytest

TESTS = Path(__file__).resolve().parent
RECORD = TESTS / "suite.json"
TOGETHER = (
    ("learned",),
    ("tiny_fleet", "router_client", "smg_router", "engine_parent"),
    ("ray_session",),
    ("pool",),
)
"""Fixtures of a session that take long to start (a run, an engine, a Ray, trainer
ranks), each of which one worker shall start alone. A file goes with the first of them
that it names."""
NUM_WORKERS = 3
"""For two cores: many tests wait, for a process that starts or a time that passes."""
_UNKNOWN_S = 2.0
"""Of a file that no record has."""
_NUM_RECORDED = 50
_NUM_PRINTED = 20
_PROGRESS_S = 20.0
_PROGRESS_VARIABLE = "INVRL_SUITE_PROGRESS"
"""In the environment of a worker: the file that its progress goes to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    file: str
    name: str
    seconds: float
    state: str
    """passed, failed or skipped."""
    is_slow: bool
    """It has the mark `slow`, so only `--all` runs it."""


Part = tuple[str, ...]
"""Files that one worker shall run."""


def shares(
    seconds_by_part: Mapping[Part, float], num_workers: int = NUM_WORKERS
) -> list[list[str]]:
    """Each worker's files. The longest part comes first, and each goes to the worker
    that has least to do so far."""
    files: list[list[str]] = [[] for _ in range(num_workers)]
    seconds = [0.0] * num_workers
    for part in sorted(
        seconds_by_part, key=lambda part: (-seconds_by_part[part], part)
    ):
        shortest = seconds.index(min(seconds))
        files[shortest].extend(part)
        seconds[shortest] += seconds_by_part[part]
    return files


def _seconds_by_file(
    recorded: Mapping[str, Mapping[str, float]], *, with_slow: bool
) -> dict[str, float]:
    return {
        file: known["quick"] + (known["slow"] if with_slow else 0.0)
        for file, known in recorded.items()
    }


def parts_of_suite(
    recorded: Mapping[str, Mapping[str, float]], *, with_slow: bool
) -> dict[Part, float]:
    """Seconds of every file of tests that there is; files that share a fixture are one
    part."""
    files_by_part: defaultdict[object, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        fixtures = ()
        if path.parent.name != "unit":  # unit tests start none of them
            fixtures = shared_fixtures(path.read_text(encoding="utf-8"))
        files_by_part[fixtures or file].append(file)
    seconds = _seconds_by_file(recorded, with_slow=with_slow)
    return {
        tuple(files): sum(seconds.get(file, _UNKNOWN_S) for file in files)
        for files in files_by_part.values()
    }


def shared_fixtures(source: str) -> tuple[str, ...]:
    """Those of `TOGETHER` that decide where a file of tests goes; none for most."""
    for fixtures in TOGETHER:
        if re.search(rf"\b({'|'.join(fixtures)})(: |\")", source):
            return fixtures
    return ()


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
    seconds: defaultdict[str, dict[str, float]] = defaultdict(
        lambda: {"quick": 0.0, "slow": 0.0}
    )
    for result in results:
        seconds[result.file]["slow" if result.is_slow else "quick"] += result.seconds
    slowest = sorted(results, key=lambda result: -result.seconds)[:_NUM_RECORDED]
    return {
        "commit": _commit(),
        "counts": dict(Counter(result.state for result in results)),
        "slow_tests": sum(result.is_slow for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "slowest": {
            f"{result.file}::{result.name}": round(result.seconds, 1)
            for result in slowest
        },
        "seconds_by_file": {
            file: {kind: round(value, 1) for kind, value in parts.items()}
            for file, parts in sorted(seconds.items())
        },
    }


def _commit() -> str:
    command = ["git", "-C", str(TESTS.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.strip()


def _recorded() -> dict[str, Mapping[str, float]]:
    if not RECORD.exists():
        return {}
    return json.loads(RECORD.read_text(encoding="utf-8"))["seconds_by_file"]


def _print_summary(found: Mapping[str, Any], *, took_s: float) -> None:
    print(f"\nThe slowest {_NUM_PRINTED} tests, in seconds:")
    for name, seconds in list(found["slowest"].items())[:_NUM_PRINTED]:
        print(f"{seconds:8.1f}  {name}")
    counts = found["counts"]
    states = ", ".join(
        f"{counts.get(state, 0)} {state}" for state in ("passed", "failed", "skipped")
    )
    print(f"{states} at {found['commit']} in {took_s / 60:.1f} minutes")


class Worker:
    """A process of pytest. With this module as a plugin it writes what it does into a
    file."""

    def __init__(
        self,
        files: Sequence[str],
        *,
        with_slow: bool,
        folder: Path,
        name: str,
        seconds_by_file: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Starts it with these files. `seconds_by_file`: how long each took
        before."""
        self._seconds_by_file = {
            file: seconds for file, seconds in seconds_by_file.items() if file in files
        }
        self.report = folder / f"{name}.xml"
        self.output = folder / f"{name}.txt"
        self._progress = folder / f"{name}.progress"
        self._progress.touch()
        choice = [] if with_slow else ["-m", "not slow"]
        python = [
            sys.executable,
            str(TESTS.parent / "launch/run_contained.py"),
            sys.executable,
        ]
        environment = {**os.environ, _PROGRESS_VARIABLE: str(self._progress)}
        # Else each of the hundreds of processes that tests start compiles our modules.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *python,
                    "-m",
                    "pytest",
                    "-p",
                    "tests.suite",
                    *choice,
                    "--junitxml",
                    str(self.report),
                    *files,
                ],
                cwd=TESTS.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.num_tests = 0
        self.num_done = 0
        self.running = "it collects its tests"
        self.files_done: set[str] = set()
        self.failed: list[str] = []
        self._num_read = 0

    def look(self) -> list[str]:
        """Reads what it has done since the last look. Returns the tests that failed
        meanwhile."""
        lines = self._progress.read_text(encoding="utf-8").splitlines(keepends=True)
        new = [
            line.rstrip("\n") for line in lines[self._num_read :] if line.endswith("\n")
        ]
        self._num_read += len(new)
        failed: list[str] = []
        for line in new:
            event, _, text = line.partition(" ")
            if event == "collected":
                self.num_tests = int(text)
            elif event == "begins":
                if text != self.running:
                    self.files_done.add(self.running)
                self.running = text
            elif event == "failed":
                failed.append(text)
            elif event == "ended":
                self.num_done += 1
        self.failed += failed
        return failed

    def share_done(self) -> float:
        """Of its time, by how long its files took before."""
        whole = sum(self._seconds_by_file.values())
        done = sum(self._seconds_by_file.get(file, 0.0) for file in self.files_done)
        return done / whole if whole else 0.0


def run(*, with_slow: bool, num_workers: int = NUM_WORKERS) -> int:
    """Runs all workers and prints what happens. Returns the exit code."""
    began = time.monotonic()
    parts = parts_of_suite(_recorded(), with_slow=with_slow)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            Worker(
                sorted(files),
                with_slow=with_slow,
                folder=Path(folder),
                name=f"worker-{number}",
                seconds_by_file=_seconds_by_file(_recorded(), with_slow=with_slow),
            )
            for number, files in enumerate(shares(parts, num_workers))
        ]
        printed_at = began
        while any(worker.process.poll() is None for worker in workers):
            time.sleep(0.5)
            for name in [name for worker in workers for name in worker.look()]:
                print(f"failed: {name}", flush=True)
            if time.monotonic() - printed_at > _PROGRESS_S:
                printed_at = time.monotonic()
                print(progress_line(workers, printed_at - began), flush=True)
        for worker in workers:
            worker.look()
            if worker.process.returncode:
                print(worker.output.read_text(encoding="utf-8", errors="replace"))
        reports = [worker.report for worker in workers if worker.report.exists()]
        found = summary(read_reports(reports))
        if with_slow:
            RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        _print_summary(found, took_s=time.monotonic() - began)
        return int(any(worker.process.returncode for worker in workers))


def progress_line(workers: Sequence[Worker], took_s: float) -> str:
    """Minutes since the start, how far the workers are, what they run, and how long the
    slowest one will take if it goes on as it did."""
    done = sum(worker.num_done for worker in workers)
    of_all = sum(worker.num_tests for worker in workers)
    least_share = min(worker.share_done() for worker in workers)
    left = ""
    if least_share > 0.02:
        left = f", about {took_s * (1 / least_share - 1) / 60:.0f} min left"
    files = ", ".join(
        worker.running for worker in workers if worker.process.poll() is None
    )
    num_failed = sum(len(worker.failed) for worker in workers)
    minutes, seconds = divmod(int(took_s), 60)
    return f"[{minutes:2}:{seconds:02}] {done} of {of_all} tests done, {num_failed} failed{left}; now {files}"


# ------------------------------------------------- in a worker, as a plugin of pytest


def _say(event: str) -> None:
    with open(os.environ[_PROGRESS_VARIABLE], "a", encoding="utf-8") as progress:
        progress.write(f"{event}\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    _say(f"collected {len(session.items)}")


def pytest_runtest_logstart(nodeid: str) -> None:
    _say(f"begins {nodeid.partition('::')[0]}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _say(f"failed {report.nodeid}")


def pytest_runtest_logfinish(nodeid: str) -> None:
    _say("ended")


# ----------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--workers", type=int, default=NUM_WORKERS)
    given = parser.parse_args(arguments)
    return run(with_slow=given.all, num_workers=given.workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
