"""What the bench compares, and what it makes of a run's metrics and processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live_run import process_role, step_shares
from benchmarks.ratios import (
    Entry,
    Speeds,
    append_history,
    falls,
    missed,
    read_history,
)


def entry(machine: str = "laptop", model: str = "m", **ratios: float) -> Entry:
    return Entry(
        date="2026-11-21", commit="abc", machine=machine, model=model, ratios=ratios
    )


def test_ratio_is_the_median_of_pairs_measured_together() -> None:
    speeds = Speeds(ours=[90.0, 40.0, 99.0], reference=[100.0, 50.0, 90.0])
    summary = speeds.summary()
    assert summary["ratio"] == 0.9
    assert summary["ratio_low"] == 0.8
    assert summary["ratio_high"] == 1.1
    assert summary["tokens_per_s"] == 90.0
    assert summary["reference_tokens_per_s"] == 90.0


def test_fall_by_more_than_a_tenth_of_the_median_is_flagged() -> None:
    history = [
        entry(fleet=1.0, trainer=2.0),
        entry(fleet=0.9, trainer=2.0),
        entry(fleet=5.0, trainer=2.0),
    ]
    [fall] = falls(entry(fleet=0.91, trainer=1.79), history)
    assert fall.name == "trainer"
    assert fall.before == 2.0
    assert fall.runs == 3
    assert str(fall) == "trainer fell to 1.790: -10% from 2.000 in 3 runs"
    assert falls(entry(fleet=0.9, trainer=1.8), history) == []
    assert [fall.name for fall in falls(entry(fleet=0.89, trainer=1.8), history)] == [
        "fleet"
    ]


def test_only_runs_of_the_same_machine_and_model_are_compared() -> None:
    history = [
        entry(machine="server", fleet=2.0),
        entry(model="other", fleet=2.0),
        entry(trainer=2.0),
    ]
    assert falls(entry(fleet=0.5), history) == []


def test_missed_bench_targets_are_named() -> None:
    assert missed({"fleet": 0.94, "trainer": 0.95, "busy_share": 0.91}) == ["fleet"]


def test_bench_history_has_one_line_per_run(tmp_path: Path) -> None:
    path = tmp_path / "results" / "history.jsonl"
    assert read_history(path) == []
    entries = [entry(fleet=1.0), entry(fleet=0.9)]
    for history_entry in entries:
        append_history(path, history_entry)
    assert read_history(path) == entries
    assert len(path.read_text().splitlines()) == 2


def test_bench_exits_with_1_and_names_the_ratio_that_fell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import loop

    for fleet, code in ((0.97, 0), (0.99, 0), (0.80, 1)):
        monkeypatch.setattr(
            loop, "_measure", lambda *_, fleet=fleet: ({"fleet": fleet}, {})
        )
        assert loop.main(["--model-path", "m", "--results", str(tmp_path)]) == code
    out = capsys.readouterr()
    assert "FELL: fleet fell to 0.800: -18% from 0.980 in 2 runs" in out.err
    assert [
        history_entry.ratios["fleet"]
        for history_entry in read_history(tmp_path / "history.jsonl")
    ] == [0.97, 0.99, 0.8]
    assert not (tmp_path / "baseline.json").exists()


def test_time_shares_exclude_the_first_and_the_last_step() -> None:
    """Two steps of 10 s each count: 6 + 7 s rollouts, 2 + 1 s training, 1 + 1 s sync, 2
    s of neither."""

    def row(time: float, rollout: float, train: float, sync: float) -> dict[str, float]:
        phases = {"time/rollout_s": rollout, "time/train_s": train, "time/sync_s": sync}
        return {
            "time": time,
            "time/step_s": rollout + train + sync + 0.5,
            **phases,
        }

    evaluation = {"time": 60.0, "eval/sampled/accuracy": 0.5}
    rows = [
        evaluation,
        row(100, 40, 5, 5),
        row(110, 6, 2, 1),
        row(120, 7, 1, 1),
        row(180, 5, 2, 1),
    ]
    assert step_shares(rows) == {
        "rollout": 0.65,
        "train": 0.15,
        "sync": 0.1,
        "busy_share": 0.9,
    }


@pytest.mark.parametrize(
    ("line", "role"),
    [
        (
            "python -m invrl.engines.inside_sglang.launch_sglang --model-path m",
            "engine",
        ),
        ("sglang::scheduler", "engine"),
        ("ray::TrainActor.train", "trainer"),
        ("ray::RolloutWorker", "worker"),
        ("python -m invrl.engines.router.launch_router --port 1", "router"),
        ("python -m invrl.host.processes.guardian 12", "guardian"),
        ("/venv/ray/core/src/ray/raylet/raylet --port 1", "ray"),
        ("sh -c true", "other"),
    ],
)
def test_processes_are_classified_by_their_command_lines(line: str, role: str) -> None:
    assert process_role(line.split()) == role
