"""What user code of a rollout worker prints is in the run folder: all of it, without
keys, within a bound."""

from __future__ import annotations

import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from invrl.rollout.workers.worker_log import WorkerLog, log_name

KEY = "isk-0" + "aB3_-" * 8 + "x9="


def printed(path: Path, program: str) -> str:
    """What is in the log once a process that takes its output there has run
    `program`."""
    before = f"""
        import logging, os, subprocess, sys, threading
        from pathlib import Path
        from invrl.rollout.workers.worker_log import WorkerLog
        print("before")
        log = WorkerLog(Path({str(path)!r}))
        log.take_output()
        KEY = {KEY!r}
    """
    text = textwrap.dedent(before) + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert done.stdout == "before\n"
    assert done.stderr == ""
    return path.read_text()


def test_python_c_code_and_child_processes_print_into_one_file_in_order(
    tmp_path: Path,
) -> None:
    text = printed(
        tmp_path / "log",
        """
        print("one")
        print("two", file=sys.stderr)
        subprocess.run(["sh", "-c", "echo three; echo four >&2"])
        os.write(1, b"five\\n")
        print("six", end="")
        sys.stdout.flush()
        """,
    )
    assert text == "one\ntwo\nthree\nfour\nfive\nsix"


def test_worker_log_is_private_and_a_later_incarnation_appends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    printed(path, "print('first incarnation')")
    assert (
        printed(path, "print('second incarnation')")
        == "first incarnation\nsecond incarnation\n"
    )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_session_keys_are_masked_in_printed_text(tmp_path: Path) -> None:
    text = printed(
        tmp_path / "log",
        """
        print(f"base_url=http://127.0.0.1:8000/s/{KEY}/v1")
        logging.basicConfig(level="INFO")
        logging.info('HTTP Request: POST http://127.0.0.1:8000/s/%s/v1/chat/completions "200 OK"', KEY)
        print({"api_key": KEY})
        raise SystemExit
        """,
    )
    assert KEY not in text
    assert "base_url=http://127.0.0.1:8000/s/(session key)/v1\n" in text
    assert (
        'POST http://127.0.0.1:8000/s/(session key)/v1/chat/completions "200 OK"'
        in text
    )
    assert "{'api_key': '(session key)'}" in text


def test_tracebacks_and_invalid_unicode_are_logged(tmp_path: Path) -> None:
    text = printed(
        tmp_path / "log",
        """
        print("lone \\ud800 surrogate, naïve")
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
        """,
    )
    assert "lone \\ud800 surrogate, naïve\n" in text
    assert "ZeroDivisionError: division by zero" in text


def test_too_long_worker_log_keeps_its_newest_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {number:06d}\n" for number in range(10_000)]
    path.write_text("".join(lines))
    log = WorkerLog(path, limit_bytes=100_000)
    with path.open("a") as still_open:  # as the process's own output is
        assert log.shorten()
        still_open.write("later\n")
    note, *kept = path.read_text().splitlines(keepends=True)
    assert kept == [*lines[-len(kept) + 1 :], "later\n"]
    assert 40_000 < path.stat().st_size < 60_000
    assert "bytes before this were left out" in note
    assert not log.shorten()


def test_missing_log_folder_does_not_end_the_worker(tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from invrl.rollout.workers.worker_log import WorkerLog
        WorkerLog(Path({str(tmp_path / "nowhere" / "log")!r})).take_output()
        print("goes on")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "cannot be written" in done.stdout
    assert done.stdout.endswith("goes on\n")


@pytest.mark.parametrize(
    ("worker", "name"), [("rollout worker 12", "rollout-worker-12.log")]
)
def test_worker_log_is_named_after_its_worker(worker: str, name: str) -> None:
    assert log_name(worker) == name
