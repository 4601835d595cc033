"""Sinks and the display: what they write, and that they never stop a run."""

from __future__ import annotations

import io
import json
import logging
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from invrl.metric_sinks import JsonlSink, SinkSet, TensorBoardSink, open_sinks
from invrl.progress import LiveProgress, NoProgress, PlainProgress, RunObserver, open_progress, sparkline


class Failing:
    def __init__(self) -> None:
        self.writes = 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.writes += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("disk full")


def test_jsonl_has_one_row_a_step_at_once(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": 0.5, "bad": math.inf, "worse": math.nan})
    (row,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert (row["step"], row["a"], row["bad"], row["worse"]) == (1, 0.5, None, None)
    sink.close()
    JsonlSink(tmp_path / "m.jsonl").write(2, {"a": 1.0})
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_tensorboard_reads_the_events_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for step in (1, 2):
        sink.write(step, {"rollout/reward_mean": step / 2})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("rollout/reward_mean")
    assert [(event.step, event.value) for event in events] == [(1, 0.5), (2, 1.0)]


def test_tensorboard_sink_imports_neither_tensorflow_nor_torch(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from invrl.metric_sinks import TensorBoardSink
TensorBoardSink(Path(sys.argv[1])).write(1, {"a": 1.0})
print(sorted({m.split(".")[0] for m in sys.modules} & {"tensorflow", "torch"}))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_failing_sink_is_logged_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing, good = Failing(), JsonlSink(tmp_path / "m.jsonl")
    sinks = SinkSet([failing, good])
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            sinks.write(step, {"a": 1.0})
    assert failing.writes == 1
    assert sum("Failing" in record.message for record in caplog.records) == 1
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 3
    sinks.close()


def test_a_sink_that_cannot_open_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "tb").touch()
    sinks = open_sinks(tmp_path / "m.jsonl", tmp_path / "tb")
    sinks.write(1, {"a": 1.0})
    assert (tmp_path / "m.jsonl").read_text()


def test_plain_progress_is_one_line_a_step() -> None:
    stream = io.StringIO()
    progress = open_progress("auto", 5, stream)
    assert isinstance(progress, PlainProgress)
    progress.phase("starting engines", 0)
    progress.phase("rollout", 1)
    progress.step(1, {"rollout/reward_mean": 0.25, "train/loss": 1.0})
    progress.step(5, {"eval/greedy/accuracy": 0.75})
    lines = [line.split("] ")[1] for line in stream.getvalue().splitlines()]
    assert lines == ["starting engines", "step 1/5: reward 0.25", "step 5/5: eval/greedy/accuracy 0.75"]


def test_live_progress_shows_phase_step_and_reward() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    progress = LiveProgress(5, console)
    progress.step(2, {"rollout/reward_mean": 0.25, "time/rollout_tokens_per_s": 123.0})
    progress.phase("train", 3)
    progress.close()
    with console.capture() as drawn:
        console.print(progress.render())
    for part in ("step 3/5", "train", "reward", "0.25", "123"):
        assert part in drawn.get()


def test_no_progress_still_prints_notes() -> None:
    stream = io.StringIO()
    progress = open_progress("none", 5, stream)
    assert type(progress) is NoProgress
    progress.step(1, {"rollout/reward_mean": 1.0})
    progress.note("run folder: x")
    assert stream.getvalue() == "run folder: x\n"


def test_sparkline_spans_low_to_high() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.5, 1.0]) == "reward 0 ▁▅█ 1"
    assert sparkline([2.0, 2.0]).count("▁") == 2


def test_a_broken_display_never_reaches_the_run(tmp_path: Path) -> None:
    class Broken(NoProgress):
        def step(self, step: int, values: Mapping[str, float]) -> None:
            raise ValueError("no terminal")

    observer = RunObserver(open_sinks(tmp_path / "m.jsonl", None), Broken(io.StringIO()))
    for step in (1, 2):
        observer.step(step, {"a": 1.0})
    observer.close()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2
