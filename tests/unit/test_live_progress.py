"""The live display of a terminal: what it says, and that a terminal is whole whatever
happens."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from invrl.buffer.groups.wait_report import WaitingGroup, WaitReport
from invrl.errors import DeadlineError, ServerError
from invrl.host.output.live_lines import drawn, past_display
from invrl.observe.screen.live_progress import Frame, LiveProgress, ShownRun
from invrl.observe.screen.progress import PlainProgress, open_progress
from invrl.observe.sinks.sinks import RunObserver, Sink
from invrl.observe.sinks.wait_messages import CurrentPhase
from invrl.run.loop.failed_rollouts import EvaluationFailures
from invrl.run.loop.held_out import CountedTasks
from invrl.run.processes.phase_progress import (
    PhaseProgress,
    StartingParts,
    rollouts_text,
)
from invrl.train.model.step_progress import StepProgress

ROOT = Path(__file__).parents[2]


# ----------------------------------------------------------------- what it says


def busy_run() -> ShownRun:
    run = ShownRun(
        num_steps=50,
        began_at=0.0,
        steps_made=12,
        step_ended_at=98.0,
        step_seconds=[5.0] * 9,
    )
    run.phase = "rollout"
    run.phase_step = 13
    run.phase_began_at = 95.8
    run.awaited = "37 of 64 rollouts (4 of 8 groups ready)"
    run.take_values(10, {"eval/greedy/accuracy": 0.51})
    for step in range(12):
        run.take_values(
            step + 1, {"rollout/reward_mean": step / 10, "train/grad_norm": 0.3}
        )
    run.failed = {"timeout": 3}
    return run


def lines_of(run: ShownRun, width: int, now: float = 100.0) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), color_system=None)
    console.print(Frame(run, now))
    return console.export_text().splitlines()


def test_frame_shows_step_time_left_reward_score_and_current_wait() -> None:
    assert lines_of(busy_run(), 100) == [
        f"step 13/50 {'━' * 12}{'─' * 38} about 3 min 08 s left",
        "reward 1.1 ▁▂▂▃▄▄▅▅▆▇▇█  held out greedy 0.51 (step 10)",
        "now rollout, 4.2 s: 37 of 64 rollouts (4 of 8 groups ready)",
        "failed 3 (timeout 3), grad norm 0.3",
    ]


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 100, 300])
def test_frame_fits_the_terminal(width: int) -> None:
    lines = lines_of(busy_run(), width)
    assert len(lines) in (4, 5)
    assert max(map(len, lines)) < max(2, width)


def test_frame_of_forty_columns_shows_everything() -> None:
    lines = lines_of(busy_run(), 40)
    for part in (
        "step 13/50 ━",
        "about 3 min 08 s left",
        "reward 1.1 ▁▂▂▃▄▄▅▅▆▇▇█",
        "37 of 64 rollouts",
    ):
        assert any(part in line for line in lines), lines
    assert lines[2] == "held out greedy 0.51 (step 10)"


def test_a_run_on_files_shows_its_losses() -> None:
    run = ShownRun(num_steps=4, began_at=0.0)
    run.take_values(0, {"eval/loss": 2.5})
    run.take_values(1, {"train/loss": 2.0, "data/epoch": 0.5})
    lines = lines_of(run, 100)
    assert lines[1] == "loss 2 ▅  held out loss 2.5 (before step 1)"
    assert "epoch 0.5" in lines[-1]


def test_awaited_text_cannot_move_the_cursor() -> None:
    out = io.StringIO()
    run = busy_run()
    run.awaited = "what\x1b[2J 日本 says"
    Console(width=60, file=out, color_system=None).print(Frame(run, 100.0))
    assert "\x1b" not in out.getvalue()
    assert "\\x1b[2J" in out.getvalue()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_left_is_estimated_from_the_last_steps() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    rows = [
        {"step": 1, "rollout/reward_mean": 0.5},
        {"step": 2, "rollout/reward_mean": 0.25},
    ]
    progress = LiveProgress(22, console, rows, clock)
    try:
        run = progress.render().run
        assert (run.curve, run.steps_made) == ([0.5, 0.25], 2)  # a run that resumes
        clock.now = 100.0  # of starting
        progress.phase("rollout", 3)
        assert run.remaining_seconds(clock.now) is None
        assert "time left: unknown" in lines_of(run, 80)[0]
        clock.now = 110.0
        progress.step(3, {"rollout/reward_mean": 0.5})
        assert run.remaining_seconds(clock.now) == 190.0
        clock.now = 114.0  # within the next step
        assert run.remaining_seconds(clock.now) == 186.0
        # which takes longer than any before: no more than it is taken off
        clock.now = 150.0
        assert run.remaining_seconds(clock.now) == 180.0
        for step in range(4, 14):
            clock.now += 2.0
            progress.step(step, {"rollout/reward_mean": 0.5})
        progress.step(13, {"eval/greedy/accuracy": 1.0})  # no step of its own
        assert run.step_seconds[1] == 42.0  # of the slow one
        assert run.remaining_seconds(clock.now) == pytest.approx(
            9 * (42.0 + 9 * 2.0) / 10
        )
    finally:
        progress.close()


# ----------------------------------------------------------------- what it asks


def report(ready: int, *missing: int, wanted: int = 4) -> WaitReport:
    groups = [
        WaitingGroup(group_id=str(index), task_id="t", missing=count, size=8)
        for index, count in enumerate(missing)
    ]
    return WaitReport(
        wanted=wanted,
        ready=ready,
        in_flight=tuple(groups),
        complete=ready,
        dropped={},
        failed={},
        filter_name="none",
        filtered_rewards={},
        filtered_limit=0,
    )


def test_progress_counts_only_rollouts_of_the_next_batch() -> None:
    assert rollouts_text(report(0), 8) == "0 of 32 rollouts (0 of 4 groups ready)"
    # Of five groups in flight the two fullest may complete the batch.
    assert (
        rollouts_text(report(2, 8, 3, 7, 1, 8), 8)
        == "28 of 32 rollouts (2 of 4 groups ready)"
    )
    assert rollouts_text(report(6, 3), 8) == "32 of 32 rollouts (4 of 4 groups ready)"


def test_progress_of_a_step_counts_the_micro_batches_of_its_pass() -> None:
    progress = StepProgress()
    assert str(progress.place) == ""
    progress.begin("old log-probs")
    assert [str(progress.place) for _ in progress.counted("ab", 2)] == [
        "old log-probs, micro-batch 1 of 2",
        "old log-probs, micro-batch 2 of 2",
    ]
    progress.end_pass()
    assert str(progress.place) == ""
    progress.next_mini_batch(2)
    progress.begin("gradients")
    next(progress.counted("abc", 3))
    assert str(progress.place) == "gradients, micro-batch 1 of 3 (mini-batch 1 of 2)"
    progress.begin("optimizer step")
    assert str(progress.place) == "optimizer step (mini-batch 1 of 2)"
    progress.next_mini_batch(2)
    progress.begin("gradients")
    assert str(progress.place) == "gradients (mini-batch 2 of 2)"
    progress.end()
    assert str(progress.place) == ""


def test_progress_counts_held_out_tasks_of_each_evaluation() -> None:
    tasks = CountedTasks(EvaluationFailures(at_start=0, rules={}, warn=print))
    assert asyncio.run(tasks.text()) == ""
    for _ in range(2):
        tasks.plan(3)
        assert asyncio.run(tasks.text()) == "0 of 3 held-out tasks"
        tasks.began("a")
        tasks.ended("a", [])
    assert asyncio.run(tasks.text()) == "1 of 3 held-out tasks"


def test_starting_processes_are_shown_until_they_are_up_or_have_failed() -> None:
    async def run() -> list[str]:
        starting = StartingParts()
        release = asyncio.Event()

        async def start() -> None:
            await release.wait()

        async def fail() -> None:
            await asyncio.sleep(0)
            raise OSError

        engines = asyncio.create_task(starting.wait_until_up("engines", start()))
        trainer = asyncio.create_task(starting.wait_until_up("trainer", fail()))
        await asyncio.sleep(0)
        texts = [await starting.text()]
        await asyncio.gather(trainer, return_exceptions=True)
        texts.append(await starting.text())
        release.set()
        await engines
        return [*texts, await starting.text()]

    assert asyncio.run(run()) == ["engines, trainer", "engines", ""]


class Screen(Sink):
    def __init__(self, *, shows_waits: bool) -> None:
        self.texts: list[str] = []
        self._shows_waits = shows_waits

    @property
    def shows_waits(self) -> bool:
        return self._shows_waits

    def awaits(self, text: str) -> None:
        self.texts.append(text)


def test_progress_is_queried_only_in_its_phase_and_for_a_live_display() -> None:
    asked: list[str] = []

    async def rollouts() -> str:
        asked.append("rollouts")
        if len(asked) == 2:
            raise DeadlineError("busy", 1.0)
        if len(asked) == 4:
            raise ServerError("dead")
        return f"answer {len(asked)}"

    async def run(screen: Screen, name: str) -> None:
        phase = CurrentPhase()
        phase.phase(name, 1)
        work = PhaseProgress(RunObserver([screen]), phase, {"rollout": rollouts})
        reporting = asyncio.create_task(work.report(interval_s=0.0))
        for _ in range(100):
            await asyncio.sleep(0)
        reporting.cancel()

    asyncio.run(run(Screen(shows_waits=False), "rollout"))
    asyncio.run(run(Screen(shows_waits=True), "train"))
    assert asked == []
    screen = Screen(shows_waits=True)
    asyncio.run(run(screen, "rollout"))
    assert screen.texts == ["answer 1", "answer 3"]
    assert len(asked) == 4  # not again after it was dead


# ----------------------------------------------------------------- a real terminal

SCRIPT = """
import os, sys, time, warnings
from invrl.host.processes import interrupts
from invrl.observe.screen.progress import open_progress
from invrl.observe.sinks.sinks import RunObserver
interrupts.catch()
observer = RunObserver([open_progress("auto", 5)])
def wait():
    time.sleep(0.6)  # the display is drawn four times a second
try:
    observer.phase("rollout", 1)
    observer.awaits("3 of 8 rollouts")
    wait()
    observer.note("a note of two\\nlines")
    print("an error line", file=sys.stderr)
    wait()
    warnings.warn("a warning")
    interrupts._say("a word of the signal handler")
    wait()
    observer.step(1, {"rollout/reward_mean": 0.25})
    {END}
finally:
    observer.close()
    print("the end", flush=True)
"""


def run_in_terminal(
    end: str,
    *,
    width: int = 80,
    interrupt: bool = False,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Exit code and everything that was written to the terminal."""
    main, terminal = pty.openpty()
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NO_COLOR", "COLUMNS", "LINES")
    }
    env |= {
        "TERM": "xterm-256color",
        "PYTHONPATH": str(ROOT),
        "PYTHONIOENCODING": "utf-8",
    }
    env |= environment or {}
    subprocess.run(
        ["stty", "rows", "30", "cols", str(width)], stdin=terminal, check=True
    )
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("{END}", end)],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
    )
    os.close(terminal)
    written = b""
    sent = False
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
        if interrupt and not sent and "reward 0.25" in written.decode(errors="replace"):
            process.send_signal(signal.SIGINT)
            sent = True
    os.close(main)
    return process.wait(), written


def seen_on(written: bytes, width: int) -> tuple[list[str], bool]:
    """What a terminal shows in the end, and whether its cursor can be seen."""
    rows: list[str] = [""]
    row = column = 0
    visible = True
    for piece in re.findall(r"\x1b\[\??[0-9;]*[A-Za-z]|[^\x1b]", written.decode()):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif piece in ("\x1b[?25l", "\x1b[?25h"):
            visible = piece.endswith("h")
        elif piece == "\x1b[2K":
            rows[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d+)A", piece):
            row -= int(up[1])
            assert row >= 0, "above the first line"
        elif piece.endswith("m") and len(piece) > 1:
            pass  # colours
        else:
            assert len(piece) == 1, f"{piece!r} is not known here"
            if column == width:  # such as a traceback's line
                row += 1
                column = 0
                rows += [""] * (row + 1 - len(rows))
            rows[row] = (
                rows[row].ljust(column)[:column] + piece + rows[row][column + 1 :]
            )
            column += 1
    return [line.rstrip() for line in rows], visible


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize(
    ("end", "interrupt", "code"),
    [
        ("pass", False, 0),
        ("raise OSError('the run failed')", False, 1),
        ("time.sleep(60)", True, -signal.SIGINT),
    ],
    ids=["end", "error", "Ctrl-C"],
)
def test_terminal_is_restored_after_the_display(
    width: int, end: str, interrupt: bool, code: int
) -> None:
    returned, written = run_in_terminal(end, width=width, interrupt=interrupt)
    shown, visible = seen_on(written, width)
    assert returned == code
    assert visible
    assert b"\x1b[?25l" in written
    for line in (
        "a note of two",
        "lines",
        "an error line",
        "invrl: a word of the signal handler",
        "the end",
    ):
        assert shown.count(line) == 1, shown
    assert any("a warning" in line for line in shown)
    # no torn rest of an earlier one
    assert sum(line.startswith("step 1/5") for line in shown) == 1, shown
    assert sum("reward 0.25" in line for line in shown) == 1
    frame = next(
        index for index, line in enumerate(shown) if line.startswith("step 1/5")
    )
    assert (
        shown.index("invrl: a word of the signal handler")
        < frame
        < shown.index("the end")
    )
    assert not any(len(line) == width for line in shown[: shown.index("the end")])
    assert "3 of 8 rollouts" in written.decode()


def test_colours_and_cursor_movements_follow_the_terminals_abilities() -> None:
    _, written = run_in_terminal("pass", environment={"NO_COLOR": "1"})
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", written)
    assert b"reward 0.25" in written
    _, written = run_in_terminal("pass", environment={"TERM": "dumb"})
    assert b"\x1b" not in written
    assert b"step 1/5: reward 0.25" in written


def test_output_that_is_not_a_terminal_gets_lines() -> None:
    assert isinstance(open_progress("auto", 5), PlainProgress)


def test_printed_text_replaces_the_lines_of_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert past_display("a\n", 2) == "a\n"  # nothing is displayed
    drawn(3)
    try:
        monkeypatch.setattr("os.isatty", lambda _: True)
        assert (
            past_display("a\n", 2) == "\r\x1b[2K" + "\x1b[1A\r\x1b[2K" * 2 + "a\n\n\n"
        )
        monkeypatch.setattr("os.isatty", lambda _: False)
        assert past_display("a\n", 2) == "a\n"
    finally:
        drawn(0)


def test_display_is_redrawn_while_nothing_happens() -> None:
    out = io.StringIO()
    progress = LiveProgress(5, Console(file=out, force_terminal=True, width=80))
    deadline = time.monotonic() + 60.0
    while out.getvalue().count("step 0/5") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    progress.close()
