"""`invrl watch`: what it shows of live, dead, torn and foreign run folders, and that it
touches none."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded_run import record_run
from rich.console import Console, ConsoleDimensions

from invrl.cli.main import main
from invrl.observe.screen.charts import block_chart, sparkline
from invrl.observe.screen.watch_screen import duration, screen
from invrl.observe.status.run_status import RunReader
from invrl.store import run_folder
from invrl.store.run_folder import RunFolder
from invrl.store.schema import connect
from invrl.store.timeline_file import (
    EngineSample,
    GatewaySample,
    Sample,
    Span,
    TimelineWriter,
)
from invrl.types.reasons import FailureReason

HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]x[/bold] \u202e"


def filled_run(root: Path) -> RunFolder:
    run = record_run(root)
    for index in range(3):
        run.add(f"task-{index}", "a reply", 1.0, index=index)
    detail = f"Traceback\nValueError: {HOSTILE}"
    run.add(
        f"task {HOSTILE}", "no", 0.0, failure=FailureReason.EXCEPTION, detail=detail
    )
    run.writer.close()
    run.ledger.close()
    rows = [
        {
            "step": step,
            "time": 100.0 + step,
            "rollout/reward_mean": step / 10,
            "rollout/reward_min": 0.0,
            "rollout/reward_max": 1.0,
            "time/step_s": 4.0,
            "eval/sampled/accuracy": step / 8,
        }
        for step in range(1, 9)
    ]
    run.folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    writer = TimelineWriter(run.folder.path)
    writer.write(
        Span(
            lane="trainer",
            name="train",
            step=8,
            start=1.0,
            end=4.0,
            waits_for="trainer",
        )
    )
    engine = EngineSample(name="engine-0", running=7, waiting=2, kv_use=0.25)
    gateway = GatewaySample(
        requests=5, latency_p50_s=0.5, latency_p95_s=1.5, loop_lag_s=0.002
    )
    writer.write(
        Sample(time=5.0, engines=(engine,), gateway=gateway, memory={"driver": 2**30})
    )
    writer.close()
    run.folder.phase_path.write_text(
        json.dumps({"pid": 1, "step": 9, "phase": "rollout", "since": time.time() - 70})
    )
    return run.folder


def frame(folder: RunFolder, *, width: int = 100) -> str:
    size = ConsoleDimensions(width=width, height=40)
    out = io.StringIO()
    status = RunReader(folder).read()
    Console(file=out, width=width, no_color=True).print(
        screen(status, size, now=time.time())
    )
    return out.getvalue()


def test_watch_frame_has_every_part(tmp_path: Path) -> None:
    text = frame(filled_run(tmp_path))
    for expected in (
        "interrupted before its last step",
        "step 8",
        "reward 0.1 -> 0.8",
        "the last phase was rollout, in step 9",
        "train",
        "waits for trainer",
        "7 running",
        "2 waiting",
        "KV cache 25%",
        "half within 0.50 s",
        "sampled/accuracy",
        "0.125 -> 1",
        "failed rollouts: 1 (exception 1)",
        "ValueError:",
    ):
        assert expected in text, expected


def test_model_text_cannot_move_the_cursor_or_style_the_screen(tmp_path: Path) -> None:
    text = frame(filled_run(tmp_path))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold]" in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_watch_lines_fit_the_terminal(width: int, tmp_path: Path) -> None:
    for line in frame(filled_run(tmp_path), width=width).splitlines():
        assert len(line) <= width


def test_only_new_failures_are_read_from_the_store(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    reader = RunReader(folder)
    assert reader.read().failed == reader.read().failed == {"exception": 1}


def test_watching_an_ended_run_does_not_change_its_folder(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    for ending in ("-wal", "-shm"):
        folder.store_path.with_name(folder.store_path.name + ending).unlink(
            missing_ok=True
        )

    def listing() -> dict[str, tuple[int, int]]:
        files = [path for path in folder.path.rglob("*") if path.is_file()]
        return {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files
        }

    before = listing()
    frame(folder)
    assert listing() == before


def test_watching_a_live_run_does_not_change_its_store(tmp_path: Path) -> None:
    """Nor SQLite's index of its log, in which readers usually leave marks."""
    folder = filled_run(tmp_path)
    with contextlib.closing(connect(folder.store_path)) as writer:
        writer.execute("INSERT INTO flushes (incarnation, at) VALUES (9, 1.0)")
        files = [
            folder.store_path.with_name(folder.store_path.name + end)
            for end in ("", "-wal", "-shm")
        ]
        before = [file.read_bytes() for file in files]
        # Another process: the connections of one process share their index.
        command = [
            sys.executable,
            "-m",
            "invrl.cli",
            "watch",
            str(folder.path),
            "--once",
        ]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        assert "not shown" not in process.stdout
        assert [file.read_bytes() for file in files] == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "metrics.jsonl",
            b'{"step": 1, "rollout/reward_mean": 0.5}\n{"step": 2, "roll',
        ),
        ("metrics.jsonl", b'{"step": 1, "rollout/reward_mean": "high"}\n\xff\n'),
        ("timeline.jsonl", b'{"kind": "span", "lane": "tra'),
        ("phase.json", b'{"pid": 1'),
        ("phase.json", b"[]"),
        ("config.resolved.toml", b"[run\n"),
        ("run.sqlite", b"SQLite format 3\x00 and then nothing"),
        ("run.sqlite", b""),
    ],
)
def test_torn_file_hides_only_its_own_part(
    name: str, content: bytes, tmp_path: Path
) -> None:
    folder = filled_run(tmp_path)
    for ending in ("-wal", "-shm"):
        folder.store_path.with_name(folder.store_path.name + ending).unlink(
            missing_ok=True
        )
    (folder.path / name).write_bytes(content)
    text = frame(folder)
    assert "interrupted" in text
    if name in ("run.sqlite", "config.resolved.toml"):
        assert "not shown" in text


def test_store_of_a_later_version_becomes_a_note(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    with sqlite3.connect(folder.store_path) as db:
        db.execute("PRAGMA user_version=999")
    db.close()
    assert "a later version of invrl wrote it" in frame(folder, width=400)


def test_exclusively_locked_store_becomes_a_note(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    with contextlib.closing(
        sqlite3.connect(folder.store_path, isolation_level=None)
    ) as holder:
        # makes the index that processes share
        holder.execute("INSERT INTO flushes VALUES (77, 1.0)")
        holder.execute("PRAGMA locking_mode=EXCLUSIVE")
        holder.execute("INSERT INTO flushes VALUES (78, 1.0)")
        assert folder.store_path.with_name("run.sqlite-shm").exists()
        text = frame(folder, width=400)
    assert "another process holds it alone" in text
    assert "reward 0.1 -> 0.8" in text, "the metrics are shown"
    assert "exception 1" in frame(folder), "it is read when it is free"


def test_a_run_without_evaluations_has_no_scores(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    for row in rows:
        del row["eval/sampled/accuracy"]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = frame(folder)
    assert "reward 0.1 -> 0.8" in text
    assert "sampled/" not in text


def test_large_and_binary_texts_and_many_metrics_fit_on_a_screen(
    tmp_path: Path,
) -> None:
    run = record_run(tmp_path)
    detail = "\x00\x01\x7f " + "x" * 1_000_000 + "\n" + "y" * 1_000_000
    run.add(
        "t" * 1_000_000,
        "z" * 1_000_000,
        0.0,
        failure=FailureReason.EXCEPTION,
        detail=detail,
    )
    run.writer.close()
    run.ledger.close()
    row = {"step": 1, "time": 1.0, "rollout/reward_mean": 0.5} | {
        f"m/{n}": float(n) for n in range(10_000)
    }
    run.folder.metrics_path.write_text(json.dumps(row) + "\n")
    text = frame(run.folder)
    assert "exception 1" in text
    assert "\x00" not in text
    assert len(text.splitlines()) <= 60
    assert max(map(len, text.splitlines())) <= 100


def test_folder_counts_as_in_use_while_its_holder_lives(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    assert not folder.is_worked_in()
    with folder.held("train"):
        assert folder.is_worked_in()
        # A command that looks takes no lock that one which begins could meet.
        with (folder.path / "run.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not folder.is_worked_in()


def test_incomplete_list_of_kernel_locks_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Incomplete:
        lists = 0

        def read_text(self, encoding: str) -> str:
            self.lists += 1
            return Path("/proc/locks").read_text(encoding) if self.lists == 2 else ""

    folder = filled_run(tmp_path)
    monkeypatch.setattr(run_folder, "_KERNEL_LOCKS", Incomplete())
    with folder.held("train"):
        assert folder.is_worked_in()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--once"],
        ["/nowhere"],
        ["/tmp"],
        ["RUN", "--onec"],
        ["RUN", "RUN"],
        ["RUN", "--interval-s=0"],
    ],
)
def test_watch_refuses_bad_input(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(filled_run(tmp_path).path)
    assert (
        main(
            [
                "watch",
                *(run if argument == "RUN" else argument for argument in arguments),
            ]
        )
        == 2
    )
    assert "fix:" in capsys.readouterr().err


def test_watch_without_a_terminal_prints_one_frame_of_a_dead_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(filled_run(tmp_path).path)
    assert main(["watch", run]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert text.count("reward 0.1 -> 0.8") == 1
    gain = "held-out accuracy, sampled: 0.125 at step 1"
    assert text.count(gain) == text.count("interrupted after step 8 of 100") == 1


def test_watch_shows_what_was_raised_in_a_run_that_failed(tmp_path: Path) -> None:
    folder = filled_run(tmp_path)
    folder.log_path("driver").write_text(
        "Traceback (most recent call last):\n  in f\nValueError: no GPU\n"
    )
    text = frame(folder)
    assert "failed before its last step" in text
    assert "ValueError: no GPU" in text


def test_lines_of_a_watched_run_show_an_evaluation_after_its_step(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = filled_run(tmp_path)
    rows: list[dict[str, float]] = [
        {"step": 9, "time": 1.0, "rollout/reward_mean": 0.75},
        {"step": 9, "time": 2.0, "eval/sampled/accuracy": 0.5},
    ]
    holding = contextlib.ExitStack()
    holding.enter_context(folder.held("train"))

    def write_one(seconds: float) -> None:
        if not rows:
            holding.close()
            return
        with folder.metrics_path.open("a") as file:
            file.write(json.dumps(rows.pop(0)) + "\n")

    monkeypatch.setattr("invrl.cli.commands.watch.time.sleep", write_one)
    assert main(["watch", str(folder.path)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()[-3:]
    assert first.startswith("step 9: ")
    assert "0.75" in first
    assert second.startswith("step 9: ")
    assert "0.75" not in second
    assert last.endswith("interrupted after step 9 of 100")


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_watch_on_a_terminal_restores_the_screen_at_its_end(
    end: str, tmp_path: Path
) -> None:
    """It leaves the alternate screen, shows the cursor again and exits with 0."""
    run = str(filled_run(tmp_path).path)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "invrl.cli", "watch", run, "--interval-s", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    asked = False
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([ours], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
        if not asked and shown.count(b"reward 0.1") >= 2:
            asked = True
            if end == "q":
                os.write(ours, b"q")
            else:
                process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0, shown[-2000:]
    os.close(ours)
    assert asked
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")


def test_charts_have_the_requested_size() -> None:
    values = [float(number) for number in range(100)]
    rows = block_chart(values, 30, 5, low=0.0, high=99.0)
    assert [len(row) for row in rows] == [30] * 5
    assert rows[0][0] == " "
    assert rows[0][-1] != " "
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([2.0, float("nan"), 2.0], 10) == "▅▅"
    assert sparkline([], 10) == "" == sparkline([1.0], 0)


def test_durations_are_written_for_people() -> None:
    seconds = (0.34, 12.4, 200.0, 7500.0, 273_600.0)
    assert [duration(value) for value in seconds] == [
        "0.3 s",
        "12 s",
        "3 min 20 s",
        "2 h 05 min",
        "3 d 4 h",
    ]
