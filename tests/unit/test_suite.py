"""The halves of the test suite, and what its reports come to."""

from __future__ import annotations

from pathlib import Path

from suite import TESTS, halves, parts_of_suite, read_reports, summary

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
    assert (first, second) == (["a", "d"], ["b", "c"])


def test_every_file_of_tests_is_in_one_half() -> None:
    parts = [*halves(parts_of_suite({}, with_slow=True))[0], *halves(parts_of_suite({}, with_slow=True))[1]]
    for path in TESTS.rglob("test_*.py"):
        file = path.relative_to(TESTS.parent).as_posix()
        assert sum(file == part or file.startswith(f"{part}/") for part in parts) == 1, file


def test_slow_tests_count_only_where_they_run() -> None:
    recorded = {"tests/unit/test_suite.py": {"quick": 1.0, "slow": 10.0}}
    assert parts_of_suite(recorded, with_slow=False)["tests/unit/test_suite.py"] == 1.0
    assert parts_of_suite(recorded, with_slow=True)["tests/unit/test_suite.py"] == 11.0


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
