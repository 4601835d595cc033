"""The shares of the test suite, and what its reports come to."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import suite
from suite import (
    TESTS,
    Worker,
    parts_of_suite,
    progress_line,
    read_reports,
    shared_fixtures,
    shares,
    summary,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.unit.test_a.TestGroup" name="test_two" time="2.0">
  <properties><property name="slow" value="True"/></properties></testcase>
<testcase classname="tests.e2e.test_b" name="test_three" time="4.0"><failure message="no"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_four" time="0.0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_five" time="0.5"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_shares_of_the_workers_take_equally_long() -> None:
    parts = {("a",): 5.0, ("b", "e"): 4.0, ("c",): 3.0, ("d",): 2.0}
    assert shares(parts, 2) == [["a", "d"], ["b", "e", "c"]]
    assert shares(parts, 3) == [["a"], ["b", "e"], ["c", "d"]]


def test_every_file_of_tests_is_in_one_share() -> None:
    all_shares = shares(parts_of_suite({}, with_slow=True))
    assert sorted(itertools.chain(*all_shares)) == sorted(
        path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")
    )


def test_files_that_share_an_engine_or_a_run_are_in_one_share() -> None:
    parts = parts_of_suite({}, with_slow=True)
    [engine] = [part for part in parts if "tests/integration/test_engine.py" in part]
    assert {
        "tests/contract/test_generate_protocol.py",
        "tests/integration/test_forked_engines.py",
        "tests/integration/test_router.py",
    } < set(engine)
    [run] = [part for part in parts if "tests/e2e/test_loop_learns.py" in part]
    assert "tests/e2e/test_view.py" in run
    assert "tests/e2e/test_faults.py" not in run


def test_fixture_of_a_file_is_one_that_it_asks_for() -> None:
    assert shared_fixtures("def test_a(pool: RankPool, ray_session: None):") == (
        "ray_session",
    )
    assert shared_fixtures('pytestmark = pytest.mark.usefixtures("ray_session")')
    assert not shared_fixtures("a pool of workers; learned = 3")


def test_slow_tests_count_only_where_they_run() -> None:
    recorded = {"tests/unit/test_suite.py": {"quick": 1.0, "slow": 10.0}}
    part = ("tests/unit/test_suite.py",)
    assert parts_of_suite(recorded, with_slow=False)[part] == 1.0
    assert parts_of_suite(recorded, with_slow=True)[part] == 11.0


def test_a_report_is_summed_up_by_file(tmp_path: Path) -> None:
    report = tmp_path / "0.xml"
    report.write_text(REPORT)
    found = summary(read_reports([report]))
    assert found["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert found["slow_tests"] == 1
    assert found["seconds_by_file"] == {
        "tests/e2e/test_b.py": {"quick": 4.5, "slow": 0.0},
        "tests/unit/test_a.py": {"quick": 1.5, "slow": 2.0},
    }
    assert next(iter(found["slowest"])) == "tests/e2e/test_b.py::test_three"


def test_progress_names_failures_and_what_runs(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_right(): pass\ndef test_wrong(): assert False\n", encoding="utf-8"
    )
    files = [str(tmp_path / "test_a.py")]
    worker = Worker(files, with_slow=True, folder=tmp_path, name="worker-0")
    assert worker.process.wait(timeout=300) == 1
    assert [name.rpartition("::")[2] for name in worker.look()] == ["test_wrong"]
    assert worker.look() == []
    assert (worker.num_done, worker.num_tests) == (2, 2)
    assert worker.running.endswith("test_a.py")
    assert worker.report.exists()


def test_remaining_time_is_that_of_the_slowest_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        suite.subprocess,
        "Popen",
        lambda *_, **options: SimpleNamespace(poll=lambda: None),
    )
    seconds = {
        "a/test_1.py": 60.0,
        "a/test_2.py": 60.0,
        "test_3.py": 300.0,
        "test_4.py": 100.0,
    }
    first, second = (
        Worker(
            files, with_slow=True, folder=tmp_path, name=name, seconds_by_file=seconds
        )
        for files, name in (
            (["a/test_1.py", "a/test_2.py"], "first"),
            (["test_3.py", "test_4.py"], "second"),
        )
    )
    assert "min left" not in progress_line([first, second], 60.0)
    first.num_tests, first.num_done, first.files_done = 100, 75, {"a/test_1.py"}
    second.num_tests, second.num_done, second.files_done = 100, 50, {"test_3.py"}
    second.failed = ["test_x"]
    line = progress_line([first, second], 605.0)
    assert line.startswith("[10:05] 125 of 200 tests done, 1 failed, about 10 min left")
