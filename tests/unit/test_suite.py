"""The halves of the test suite, and what its reports come to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import suite
from suite import (
    TESTS,
    Half,
    halves,
    parts_of_suite,
    progress_line,
    read_reports,
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


def test_test_halves_take_equally_long() -> None:
    first, second = halves({"a": 5.0, "b": 4.0, "c": 3.0, "d": 2.0})
    assert first == ["a", "d"]
    assert second == ["b", "c"]


def test_every_file_of_tests_is_in_one_half() -> None:
    parts = [
        *halves(parts_of_suite({}, with_slow=True))[0],
        *halves(parts_of_suite({}, with_slow=True))[1],
    ]
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS.parent).as_posix()
        assert (
            sum(file == part or file.startswith(f"{part}/") for part in parts) == 1
        ), file


def test_slow_tests_count_only_where_they_run() -> None:
    recorded = {"tests/unit/test_suite.py": {"quick": 1.0, "slow": 10.0}}
    assert parts_of_suite(recorded, with_slow=False)["tests/unit/test_suite.py"] == 1.0
    assert parts_of_suite(recorded, with_slow=True)["tests/unit/test_suite.py"] == 11.0


def test_a_report_is_summed_up_by_file(tmp_path: Path) -> None:
    report = tmp_path / "0.xml"
    report.write_text(REPORT)
    totals = summary(read_reports([report]))
    assert totals["counts"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert totals["slow_tests"] == 1
    assert totals["seconds_by_file"] == {
        "tests/e2e/test_b.py": {"quick": 4.5, "slow": 0.0},
        "tests/unit/test_a.py": {"quick": 1.5, "slow": 2.0},
    }
    assert next(iter(totals["slowest"])) == "tests/e2e/test_b.py::test_three"


def test_progress_names_failures_and_what_runs(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "def test_right(): pass\ndef test_wrong(): assert False\n", encoding="utf-8"
    )
    half = Half(
        [str(tmp_path / "test_a.py")], with_slow=True, folder=tmp_path, name="half-0"
    )
    assert half.process.wait(timeout=300) == 1
    assert [name.rpartition("::")[2] for name in half.look()] == ["test_wrong"]
    assert half.look() == []
    assert half.num_done == 2
    assert half.num_tests == 2
    assert half.running.endswith("test_a.py")
    assert half.report.exists()


def test_remaining_time_is_that_of_the_slower_half(
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
        Half(parts, with_slow=True, folder=tmp_path, name=name, seconds_by_file=seconds)
        for parts, name in ((["a"], "first"), (["test_3.py", "test_4.py"], "second"))
    )
    assert "min left" not in progress_line([first, second], 60.0)
    first.num_tests = 100
    first.num_done = 75
    first.files_done = {"a/test_1.py"}
    second.num_tests = 100
    second.num_done = 50
    second.files_done = {"test_3.py"}
    second.failed = ["test_x"]
    line = progress_line([first, second], 605.0)
    assert line.startswith("[10:05] 125 of 200 tests done, 1 failed, about 10 min left")
