"""The queue of the test suite, and what its reports come to."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from suite import (
    TESTS,
    Worker,
    parts_of_suite,
    progress_line,
    put_in_queue,
    read_reports,
    shared_fixtures,
    summary,
    take_from_queue,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_one" time="1.5"/>
<testcase classname="tests.unit.test_a.TestGroup" name="test_two" time="2.0">
  <properties><property name="slow" value="True"/></properties></testcase>
<testcase classname="tests.e2e.test_b" name="test_three" time="4.0"><failure message="no"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_four" time="0.0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.e2e.test_b" name="test_five" time="0.5"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_longest_part_comes_first() -> None:
    slow_file, fast_file = "tests/unit/test_suite.py", "tests/test_architecture.py"
    parts = parts_of_suite({slow_file: 300.0, fast_file: 200.0})
    assert parts[:2] == [(slow_file,), (fast_file,)]


def test_every_file_of_tests_is_in_one_part() -> None:
    assert sorted(itertools.chain(*parts_of_suite({}))) == sorted(
        path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py")
    )


def test_short_files_are_taken_together() -> None:
    assert len(parts_of_suite({})) < 0.2 * len(list(TESTS.rglob("test_*.py")))


def test_each_part_is_taken_by_one_process(tmp_path: Path) -> None:
    parts = [("a", "b"), ("c",), ("d",)]
    queue = tmp_path / "queue"
    put_in_queue(parts, queue)
    first, second = take_from_queue(queue), take_from_queue(queue)
    assert [next(first), next(second), next(first)] == parts
    assert [*first, *second] == []


def test_files_that_share_an_engine_or_a_run_are_in_one_share() -> None:
    parts = parts_of_suite({})
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


def test_worker_runs_the_parts_and_names_failures(tmp_path: Path) -> None:
    right, wrong, broken = (
        tmp_path / f"test_{name}.py" for name in ("right", "wrong", "broken")
    )
    right.write_text("def test_right(): pass\n", encoding="utf-8")
    wrong.write_text("def test_wrong(): assert 1 + 1 == 3\n", encoding="utf-8")
    broken.write_text("import nothing_of_this_name\n", encoding="utf-8")
    put_in_queue([(str(wrong), str(right)), (str(broken),)], tmp_path / "queue")
    worker = Worker(
        tmp_path / "queue", with_slow=True, folder=tmp_path, name="worker-0"
    )
    assert worker.process.wait(timeout=300) == 1
    test_of_wrong, _ = worker.look()
    assert test_of_wrong.endswith("::test_wrong")
    assert "No module named 'nothing_of_this_name'" in worker.output.read_text()
    assert worker.look() == []
    assert worker.num_done == 2
    assert worker.files_done == {str(right), str(wrong), str(broken)}
    states = [result.state for result in read_reports([worker.report])]
    assert sorted(states) == ["failed", "failed", "passed"]


def test_each_part_finds_the_fixtures_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import pytest\n@pytest.fixture\ndef one(): return 1\n", encoding="utf-8"
    )
    parts: list[tuple[str, ...]] = []
    for name in ("first", "second"):
        file = tmp_path / f"test_{name}.py"
        file.write_text(f"def test_{name}(one): assert one == 1\n", encoding="utf-8")
        parts.append((str(file),))
    put_in_queue(parts, tmp_path / "queue")
    worker = Worker(
        tmp_path / "queue", with_slow=True, folder=tmp_path, name="worker-0"
    )
    assert worker.process.wait(timeout=300) == 0
    worker.look()
    assert worker.num_done == 2


def test_worker_whose_tests_are_all_slow_succeeds(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): assert False\n",
        encoding="utf-8",
    )
    put_in_queue([(str(tmp_path / "test_slow.py"),)], tmp_path / "queue")
    worker = Worker(
        tmp_path / "queue", with_slow=False, folder=tmp_path, name="worker-0"
    )
    assert worker.process.wait(timeout=300) == 0


def test_remaining_time_follows_the_recorded_times() -> None:
    def worker_of(
        running: str, files_done: set[str], num_done: int, failed: list[str]
    ) -> Worker:
        process = SimpleNamespace(poll=lambda: None)
        return cast(
            Worker,
            SimpleNamespace(
                process=process,
                running=running,
                files_done=files_done,
                num_done=num_done,
                failed=failed,
            ),
        )

    seconds = {"test_1.py": 60.0, "test_2.py": 60.0, "test_3.py": 120.0}
    just_begun = worker_of("test_1.py", set(), 0, [])
    assert "min left" not in progress_line([just_begun], seconds, 60.0)
    halfway = [
        worker_of("test_2.py", {"test_1.py"}, 75, []),
        worker_of("test_3.py", {"test_2.py"}, 50, ["test_x"]),
    ]
    assert (
        progress_line(halfway, seconds, 605.0)
        == "[10:05] 125 tests done, 1 failed, about 10 min left; now test_2.py, test_3.py"
    )
