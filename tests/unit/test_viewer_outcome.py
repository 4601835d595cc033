"""The line with which the viewer's overview begins: what a run gained, and why it
ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from recorded_run import record_run

from invrl.observe.status.outcome import outcome_line, outcome_metrics
from invrl.rollout.dispatch.evaluation import EvalScore, Evaluation, gain_interval
from invrl.run.loop.held_out import HeldOutEvaluations
from invrl.run.settings.config import resolve
from invrl.viewer.viewed_run import ViewedRun


def evaluation(share: float) -> Evaluation:
    exact_K = np.random.default_rng(0).random(50) < share
    rewards = tuple((float(exact),) for exact in exact_K)
    score = EvalScore(
        mode="greedy", task_ids=tuple(map(str, range(50))), rewards=rewards, failures={}
    )
    return Evaluation(scores={"greedy": score})


class Console:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


async def test_the_gain_that_the_run_measured_is_told_with_its_interval(
    tmp_path: Path,
) -> None:
    run = record_run(tmp_path)
    run.folder.report_path.mkdir(exist_ok=True)
    before = evaluation(0.2)
    after = evaluation(0.9)
    console = Console()
    held_out = HeldOutEvaluations(resolve(), run.folder, None, console)  # type: ignore[arg-type]
    await held_out.report_gain(before, after)
    gain = gain_interval(before.scores["greedy"], after.scores["greedy"])
    line = outcome_line(
        state="ended",
        step=12,
        num_steps=12,
        report=run.folder.report_path,
        series={},
        log_end="",
    )
    again = outcome_line(
        state="running",
        step=13,
        num_steps=24,
        report=run.folder.report_path,
        series={},
        log_end="",
    )
    assert again == "running, step 13 of 24", "the gain was that of its first end"
    low = before.scores["greedy"].accuracy.value
    high = after.scores["greedy"].accuracy.value
    assert line == (
        f"held-out accuracy, greedy: {low:.3f} → {high:.3f}, gain {gain.value:+.3f}, "
        f"95 % interval [{gain.low:+.3f}, {gain.high:+.3f}]; ended after step 12 of 12"
    )
    assert f"gain {gain.value:+.3f}" in console.notes[0]


def line_of(
    tmp_path: Path, state: str, series: dict[str, list[float | None]], log_end: str = ""
) -> str:
    points = {
        name: [(step, 0.0, value) for step, value in enumerate(values)]
        for name, values in series.items()
    }
    return outcome_line(
        state=state,
        step=3,
        num_steps=10,
        report=tmp_path,
        series=points,
        log_end=log_end,
    )


def test_until_then_the_first_and_the_last_value_are_told(tmp_path: Path) -> None:
    accuracy: dict[str, list[float | None]] = {
        "eval/greedy/accuracy": [0.25, None, 0.5],
        "rollout/reward_mean": [0.1, 0.2],
    }
    assert line_of(tmp_path, "running", accuracy) == (
        "held-out accuracy, greedy: 0.250 at step 0 → 0.500 at step 2; running, step 3 of 10"
    )
    reward: dict[str, list[float | None]] = {"rollout/reward_mean": [0.1, 0.2]}
    assert line_of(tmp_path, "interrupted", reward) == (
        "training reward: 0.100 at step 0 → 0.200 at step 1; interrupted after step 3 of 10"
    )
    loss: dict[str, list[float | None]] = {"eval/loss": [2.5], "train/loss": [3.0, 2.0]}
    assert line_of(tmp_path, "ended", loss).startswith(
        "held-out loss: 2.500 at step 0; ended"
    )
    assert line_of(tmp_path, "running", {}) == "running, step 3 of 10"
    assert outcome_metrics([*accuracy, "train/lr", "eval/greedy/accuracy_low"]) == list(
        accuracy
    )


TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in f
invrl.errors.IdenticalFailuresError: all 32 rollouts so far failed (exception)"""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_run_says_what_was_raised(tmp_path: Path, as_json: bool) -> None:
    log_end = f"driver: the run failed\n{TRACEBACK}\ndriver: ended"
    if as_json:
        log_end = json.dumps({"message": "the run failed", "exception": TRACEBACK})
    line = line_of(tmp_path, "failed", {}, log_end)
    assert line == (
        "failed after step 3 of 10: invrl.errors.IdenticalFailuresError: all 32 rollouts so far failed "
        "(exception)"
    )
    assert "see logs/driver.log" in line_of(tmp_path, "failed", {})


def test_a_damaged_file_of_gains_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "gains.json").write_text("[{")
    assert line_of(tmp_path, "ended", {}) == "ended after step 3 of 10"


def test_the_server_sends_the_line(tmp_path: Path) -> None:
    run = record_run(tmp_path)
    run.folder.metrics_path.write_text(
        '{"step": 1, "time": 1.0, "rollout/reward_mean": 0.5}\n'
    )
    viewed = ViewedRun("run", run.folder, tmp_path / "cache")
    viewed.metrics.refresh()
    assert (
        viewed.overview()["outcome"]
        == "training reward: 0.500 at step 1; interrupted after step 1 of 100"
    )
