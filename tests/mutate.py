"""Plants the small errors of `tests/mutations.toml`, one at a time, and says which test
catches each.

python tests/mutate.py                 every error, and the quick tests that are to catch it
python tests/mutate.py --all           the slow tests too, for an error that the quick ones do not catch
python tests/mutate.py --only packing  the errors whose name or file contains this word
python tests/mutate.py --resume        leaves out what `tests/mutations_result.json` says is caught

The errors are planted in a copy of the tree, so the working tree stays as it is. At
first the tests run once without an error: a test that fails by itself catches nothing.
What is found is written after each error. What tests leave behind ends with `python
launch/run_contained.py python tests/mutate.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = ROOT / "tests/mutations.toml"
RESULT = ROOT / "tests/mutations_result.json"
_TEST_TIMEOUT_S = 120
"""An error that makes a test hang is caught, too."""
_RUN_TIMEOUT_S = 900
_POLL_S = 0.05
_WARM = (
    "aiohttp",
    "fastapi",
    "hypothesis",
    "httpx",
    "openai",
    "torch",
    "transformers",
    "uvicorn",
)
"""Packages that most tests need. They are imported once: each run of pytest is forked
from this process."""
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = 5
"""pytest's exit code where the marks leave no test."""

Catcher = Literal["quick", "all", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A small error in the product, as text that is replaced."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    """Files or node ids."""

    def fault(self) -> str:
        """Why it cannot be planted; "" if it can."""
        path = ROOT / self.file
        if not path.is_file():
            return f"{self.name}: there is no {self.file}"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"{self.name}: {self.file} has its text {count} times: {self.old!r}"
        if self.old == self.new:
            return f"{self.name}: it changes nothing"
        missing = [
            test
            for test in self.tests
            if not (ROOT / test.partition("::")[0]).is_file()
        ]
        if missing:
            return f"{self.name}: there is no {missing[0]}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of a mutation."""

    caught_by: Catcher
    first_test: str = ""
    """The test that failed first."""
    seconds: float


def read_mutations() -> list[Mutation]:
    """Those of `tests/mutations.toml`, in its order."""
    tables = tomllib.loads(MUTATIONS.read_text())["mutation"]
    return [Mutation(**{**table, "tests": tuple(table["tests"])}) for table in tables]


def faults_of(mutations: Iterable[Mutation]) -> list[str]:
    """Why some of them cannot be planted, a line each."""
    mutations = list(mutations)
    faults = [fault for mutation in mutations if (fault := mutation.fault())]
    names = Counter(mutation.name for mutation in mutations)
    return faults + [
        f"{name}: {count} mutations have this name"
        for name, count in names.items()
        if count > 1
    ]


def copy_tree(target: Path) -> None:
    """Copies the files of the working tree that git does not ignore."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def first_failure(tree: Path, tests: Sequence[str], marks: str) -> str | None:
    """Runs tests in a copy of the tree up to the first that fails. Returns its node id;
    None if none does."""
    output = tree / "output.txt"
    arguments = ["-q", "-x", "-rfE", "--tb=no", f"--timeout={_TEST_TIMEOUT_S}"]
    arguments += ["--hypothesis-profile=first failure", "-p", "no:cacheprovider"]
    process = os.fork()
    if process == 0:
        _run_pytest(tree, [*arguments, "-m", marks, *tests], output)
    exit_code = _wait_for(process, deadline_s=_RUN_TIMEOUT_S)
    if exit_code in (0, _NO_TESTS):
        return None
    if exit_code is None:
        return f"the tests did not end within {_RUN_TIMEOUT_S} s"
    failure = _FIRST_FAILURE.search(output.read_text(errors="replace"))
    if failure is None:
        return f"pytest ends with {exit_code}"
    return failure.group(1)


def _run_pytest(tree: Path, arguments: Sequence[str], output: Path) -> NoReturn:
    """Runs in a child process, which has what `_WARM` names and nothing of the tree."""
    os.setsid()
    os.chdir(tree)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # the first was the folder of this script
    sys.path[:1] = [str(tree), str(tree / "tests")]
    os.environ["PYTHONPATH"] = f"{tree}:{tree / 'tests'}"
    exit_code = 1
    try:
        exit_code = int(pytest.main(list(arguments)))
        sys.stdout.flush()
    finally:
        os._exit(exit_code)  # what the parent does at its end is not the child's


def _wait_for(process: int, *, deadline_s: float) -> int | None:
    """The exit code of a child, which leads a session; None if it does not end. Ends
    what is left of it."""
    deadline = time.monotonic() + deadline_s
    ended, status = os.waitpid(process, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        ended, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not ended:
        os.waitpid(process, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def find_catcher(tree: Path, mutation: Mutation, *, with_slow: bool) -> Finding:
    """Plants a mutation in a copy of the tree, runs its tests, and takes it out
    again."""
    started = time.monotonic()
    path = tree / mutation.file
    whole = path.read_text()
    times = path.stat()
    path.write_text(whole.replace(mutation.old, mutation.new))
    caught_by: Catcher = "quick"
    try:
        failure = first_failure(tree, mutation.tests, "not slow")
        if failure is None and with_slow:
            caught_by = "all"
            failure = first_failure(tree, mutation.tests, "slow")
    finally:
        path.write_text(whole)
        # so its compiled file is not taken for this
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if failure is None:
        caught_by = "nothing"
    seconds = round(time.monotonic() - started, 1)
    return Finding(caught_by=caught_by, first_test=failure or "", seconds=seconds)


def read_result() -> dict[str, Finding]:
    """By the mutation's name."""
    if not RESULT.is_file():
        return {}
    return {
        name: Finding(**found) for name, found in json.loads(RESULT.read_text()).items()
    }


def write_result(mutations: Iterable[Mutation], findings: dict[str, Finding]) -> None:
    """In the order of the mutations; what is no mutation any more is left out."""
    kept = {
        mutation.name: asdict(findings[mutation.name])
        for mutation in mutations
        if mutation.name in findings
    }
    RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def check_tests(
    tree: Path, mutations: Iterable[Mutation], *, with_slow: bool
) -> str | None:
    """Runs the tests of the mutations without an error. Returns the first that
    fails."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    failure = first_failure(tree, tests, "not slow")
    if failure is None and with_slow:
        failure = first_failure(tree, tests, "slow")
    return failure


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    mutations = read_mutations()
    faults = faults_of(mutations)
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 2
    findings = read_result()
    chosen = [
        mutation
        for mutation in mutations
        if options.only in f"{mutation.name} {mutation.file}"
    ]
    if options.resume:
        caught = {
            name for name, found in findings.items() if found.caught_by != "nothing"
        }
        chosen = [mutation for mutation in chosen if mutation.name not in caught]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
    for package in _WARM:
        importlib.import_module(package)
    with tempfile.TemporaryDirectory(prefix="invrl-mutations-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        failure = check_tests(tree, chosen, with_slow=options.all) if chosen else None
        if failure is not None:
            print(f"a test fails without an error: {failure}", file=sys.stderr)
            return 2
        for number, mutation in enumerate(chosen, start=1):
            found = find_catcher(tree, mutation, with_slow=options.all)
            findings[mutation.name] = found
            write_result(mutations, findings)
            outcome = (
                f"{found.caught_by}: {found.first_test}"
                if found.first_test
                else "NOT CAUGHT"
            )
            print(
                f"{number}/{len(chosen)} {mutation.name}: {outcome} ({found.seconds:g} s)",
                flush=True,
            )
    counts = Counter(findings[mutation.name].caught_by for mutation in chosen)
    print(
        f"caught: {counts['quick']} by quick tests, {counts['all']} by slow ones, {counts['nothing']} by none"
    )
    return 1 if counts["nothing"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
