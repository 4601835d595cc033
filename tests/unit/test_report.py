"""The report, from metrics.jsonl alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from invrl.errors import ConfigError
from invrl.metric_sinks import JsonlSink
from invrl.report import curve, eval_names, read_metrics, write_report


def dead_run(folder: Path) -> Path:
    """What a killed run leaves: steps, an evaluation before training, and half a line."""
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.step(
        0,
        {
            f"eval/{mode}/accuracy{part}": 0.25
            for mode in ("greedy", "sampled")
            for part in ("", "_low", "_high")
        },
    )
    for step in (1, 2, 3):
        sink.step(step, {"rollout/reward_mean": step / 4, "rollout/reward_std": 0.1})
    sink.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/rew')
    return folder


def test_a_dead_run_gets_its_picture(tmp_path: Path) -> None:
    picture = write_report(dead_run(tmp_path))
    assert picture == tmp_path / "report" / "reward.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5_000


def test_curves_hold_what_was_measured(tmp_path: Path) -> None:
    rows = read_metrics(dead_run(tmp_path) / "metrics.jsonl")
    assert curve(rows, "rollout/reward_mean") == ([1, 2, 3], [0.25, 0.5, 0.75])
    assert eval_names(rows) == ["eval/greedy/accuracy", "eval/sampled/accuracy"]


def test_a_step_written_twice_counts_once_and_null_not_at_all(tmp_path: Path) -> None:
    rows = [{"step": 2, "a": 1.0}, {"step": 1, "a": None}, {"step": 2, "a": 3.0}, {"step": 3, "b": 1.0}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert curve(read_metrics(tmp_path / "m.jsonl"), "a") == ([2], [3.0])


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no steps"):
        write_report(tmp_path)
