"""Curves are read from metrics.jsonl alone, also from that of a killed run."""

from __future__ import annotations

import json
from pathlib import Path

from invrl.observe.metrics.metric_curves import curve, eval_names
from invrl.observe.sinks.sinks import JsonlSink
from invrl.store.metrics_file import read_metrics


def dead_run(folder: Path) -> Path:
    """What a killed run leaves: steps, an evaluation before training, and half a
    line."""
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


def test_curves_hold_the_measured_values(tmp_path: Path) -> None:
    rows = read_metrics(dead_run(tmp_path) / "metrics.jsonl")
    assert curve(rows, "rollout/reward_mean") == ([1, 2, 3], [0.25, 0.5, 0.75])
    assert eval_names(rows) == ["eval/greedy/accuracy", "eval/sampled/accuracy"]


def test_step_written_twice_counts_once_and_null_is_ignored(tmp_path: Path) -> None:
    rows = [
        {"step": 2, "a": 1.0},
        {"step": 1, "a": None},
        {"step": 2, "a": 3.0},
        {"step": 3, "b": 1.0},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert curve(read_metrics(tmp_path / "m.jsonl"), "a") == ([2], [3.0])
