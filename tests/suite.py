"""The test suite as `launch/test.sh` runs it: workers side by side that take the next
files when they are done with theirs, what they do meanwhile, and what they came to.

python tests/suite.py        the quick tests
python tests/suite.py --all  all tests; writes `tests/suite.json`, by which the longest files come first
python tests/suite.py --workers N  with so many workers; else by how busy the machine is
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
_QUIET_WORKERS = 3
"""For two cores: many tests wait, for a process that starts or a time that passes."""
_BUSY_WORKERS = 6
"""Beside other programs each worker gets less of a core."""
_UNKNOWN_S = 2.0
"""Of a file that no record has."""
_SHORTEST_PART_S = 20.0
"""Shorter files are put together: each time that a worker collects costs a moment."""
_NUM_RECORDED = 50
_NUM_PRINTED = 20
_PROGRESS_S = 20.0
_PROGRESS_VARIABLE = "INVRL_SUITE_PROGRESS"
"""In the environment of a worker: the file that its progress goes to."""
_QUEUE_VARIABLE = "INVRL_SUITE_QUEUE"
"""In the environment of a worker: the folder of the parts that no worker has taken."""


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
"""Files that one worker shall run, one after the other."""


def _seconds_by_file(
    recorded: Mapping[str, Mapping[str, float]], *, with_slow: bool
) -> dict[str, float]:
    return {
        file: known["quick"] + (known["slow"] if with_slow else 0.0)
        for file, known in recorded.items()
    }


def parts_of_suite(seconds_by_file: Mapping[str, float]) -> list[Part]:
    """Every file of tests that there is, in the order in which the workers shall take
    them: the longest part first. Files that share a fixture are one part, and so are
    several that are short."""
    files_by_fixtures: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = path.relative_to(TESTS.parent).as_posix()
        fixtures = ()
        if path.parent.name != "unit":  # unit tests start none of them
            fixtures = shared_fixtures(path.read_text(encoding="utf-8"))
        files_by_fixtures[fixtures].append(file)
    files_alone = files_by_fixtures.pop((), [])
    parts = [tuple(files) for files in files_by_fixtures.values()]

    def seconds(part: Part) -> float:
        return sum(seconds_by_file.get(file, _UNKNOWN_S) for file in part)

    short: Part = ()
    for file in files_alone:
        if seconds((file,)) >= _SHORTEST_PART_S:
            parts.append((file,))
            continue
        short = (*short, file)
        if seconds(short) >= _SHORTEST_PART_S:
            parts.append(short)
            short = ()
    if short:
        parts.append(short)
    return sorted(parts, key=lambda part: (-seconds(part), part))


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


def put_in_queue(parts: Sequence[Part], queue: Path) -> None:
    queue.mkdir()
    files = itertools.chain.from_iterable(parts)
    _list_of_files(queue).write_text("\n".join(files), encoding="utf-8")
    for number, part in enumerate(parts):
        (queue / f"{number:04}").write_text("\n".join(part), encoding="utf-8")


def _list_of_files(queue: Path) -> Path:
    """Return the file that lists what all parts have."""
    return queue.with_suffix(".files")


def take_from_queue(queue: Path) -> Iterator[Part]:
    """Each part that no other process has taken, until none is left."""
    taken = queue.parent / f"taken-by-{os.getpid()}"
    for number in itertools.count():
        try:
            (queue / f"{number:04}").rename(taken)  # only one process succeeds
        except FileNotFoundError:
            if not any(queue.iterdir()):
                return
            continue
        yield tuple(taken.read_text(encoding="utf-8").splitlines())


class Worker:
    """A process of pytest that takes parts of the suite from a queue. With this module
    as a plugin it writes what it does into a file."""

    def __init__(
        self, queue: Path, *, with_slow: bool, folder: Path, name: str
    ) -> None:
        """Starts it."""
        self.report = folder / f"{name}.xml"
        self.output = folder / f"{name}.txt"
        self._progress = folder / f"{name}.progress"
        self._progress.touch()
        choice = [] if with_slow else ["-m", "not slow"]
        contained = [sys.executable, str(TESTS.parent / "launch/run_contained.py")]
        pytest_command = [sys.executable, "-m", "pytest", "-p", "tests.suite"]
        environment = {
            **os.environ,
            _PROGRESS_VARIABLE: str(self._progress),
            _QUEUE_VARIABLE: str(queue),
        }
        # Else each of the hundreds of processes that tests start compiles our modules.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*contained, *pytest_command, *choice, "--junitxml", str(self.report)],
                cwd=TESTS.parent,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.num_done = 0
        self.running = ""
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
            if event == "begins":
                self.running = text
            elif event == "did":
                self.files_done.add(text)
            elif event == "failed":
                failed.append(text)
            elif event == "ended":
                self.num_done += 1
        self.failed += failed
        return failed


def choose_num_workers() -> int:
    """Look for a second at how many threads want a core."""
    counts: list[int] = []
    for _ in range(20):
        time.sleep(0.05)
        text = Path("/proc/stat").read_text(encoding="ascii")
        counts.append(int(text.partition("procs_running ")[2].split()[0]) - 1)
    is_busy = statistics.mean(counts) > (os.cpu_count() or 1)
    return _BUSY_WORKERS if is_busy else _QUIET_WORKERS


def run(*, with_slow: bool, num_workers: int) -> int:
    """Runs all workers and prints what happens. Returns the exit code."""
    began = time.monotonic()
    seconds_by_file = _seconds_by_file(_recorded(), with_slow=with_slow)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        put_in_queue(parts_of_suite(seconds_by_file), folder / "queue")
        workers = [
            Worker(
                folder / "queue",
                with_slow=with_slow,
                folder=folder,
                name=f"worker-{number}",
            )
            for number in range(num_workers)
        ]
        printed_at = began
        while any(worker.process.poll() is None for worker in workers):
            time.sleep(0.5)
            for name in [name for worker in workers for name in worker.look()]:
                print(f"failed: {name}", flush=True)
            if time.monotonic() - printed_at > _PROGRESS_S:
                printed_at = time.monotonic()
                line = progress_line(workers, seconds_by_file, printed_at - began)
                print(line, flush=True)
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


def progress_line(
    workers: Sequence[Worker], seconds_by_file: Mapping[str, float], took_s: float
) -> str:
    """Minutes since the start, how far the workers are, what they run, and how long the
    rest will take, by how long the files took before."""
    num_done = sum(worker.num_done for worker in workers)
    num_failed = sum(len(worker.failed) for worker in workers)
    done_s = sum(
        seconds_by_file.get(file, 0.0)
        for worker in workers
        for file in worker.files_done
    )
    of_all = done_s / (sum(seconds_by_file.values()) or 1.0)
    left = ""
    if of_all > 0.02:
        left = f", about {took_s * (1 / of_all - 1) / 60:.0f} min left"
    running = [
        worker.running
        for worker in workers
        if worker.running and worker.process.poll() is None
    ]
    now = f"; now {', '.join(running)}" if running else ""
    minutes, seconds = divmod(int(took_s), 60)
    return f"[{minutes:2}:{seconds:02}] {num_done} tests done, {num_failed} failed{left}{now}"


# ------------------------------------------------- in a worker, as a plugin of pytest


def _say(event: str) -> None:
    with open(os.environ[_PROGRESS_VARIABLE], "a", encoding="utf-8") as progress:
        progress.write(f"{event}\n")


def pytest_collection() -> bool:
    """Nothing is collected before it is taken from the queue."""
    return True


def pytest_runtestloop(session: pytest.Session) -> bool:
    """A file is imported when its part is taken. The folders with their fixtures are
    collected once: pytest gives the fixtures of a conftest to them alone."""
    queue = Path(os.environ[_QUEUE_VARIABLE])
    files = _list_of_files(queue).read_text(encoding="utf-8").splitlines()
    modules = session.perform_collect(files, genitems=False)
    module_of = {module.path: module for module in modules}
    num_collected = 0
    for part in take_from_queue(queue):
        sys.dont_write_bytecode = False
        gc.disable()
        names = {TESTS.parent / file: file for file in part}
        items: list[pytest.Item] = []
        for path in names:
            items.extend(session.genitems(module_of[path]))
        session.items = items
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=items
        )
        gc.freeze()  # what was imported: to look through it took a second each time
        gc.enable()
        # Modules that tests write are theirs: nothing is kept beside them.
        sys.dont_write_bytecode = True
        num_collected += len(items)
        for item, following in itertools.zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if following is None or following.path != item.path:
                _say(f"did {names.pop(item.path)}")
        for file in names.values():  # nothing of them was chosen
            _say(f"did {file}")
    session.testscollected = num_collected
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker that found nothing to do is not to blame."""
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _say(f"failed {report.nodeid}")


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
    parser.add_argument("--workers", type=int)
    given = parser.parse_args(arguments)
    num_workers = given.workers or choose_num_workers()
    return run(with_slow=given.all, num_workers=num_workers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
