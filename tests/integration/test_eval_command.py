"""`invrl eval` as a user starts it, on the real stack without a trainer: two sets, a
tiny random model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from invrl.cli.commands.evaluate import table
from invrl.rollout.dispatch.evaluation import EvalScore

ROOT = Path(__file__).parents[2]
DEADLINE_S = 600


@pytest.mark.timeout(DEADLINE_S)
def test_eval_command_measures_two_sets_and_leaves_no_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held out.jsonl"
    # b: the function raises KeyError
    held_out.write_text('{"id": "a", "prompt": "say fox"}\n{"id": "b"}\n')
    run = tmp_path / "measured"
    flags = [
        "--model-path",
        str(tiny_model),
        "--config",
        str(ROOT / "tests/e2e/trivial.toml"),
    ]
    flags += [
        "--run-root",
        str(tmp_path),
        "--run-name",
        run.name,
        "--eval.samples-per-task",
        "4",
    ]
    flags += [
        "--eval.sets",
        f"words=tests.e2e.trivial:tasks,file={held_out}",
        "--eval.tasks",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "invrl.cli", "eval", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert (run / "tokenizer" / "tokenizer.json").read_bytes() == (
        tiny_model / "tokenizer.json"
    ).read_bytes()
    report = json.loads((run / "report" / "eval.json").read_text())
    assert report["model"] == str(tiny_model)
    assert report["config"]["rollout"]["max_new_tokens"] == 8
    assert {"sglang", "ray"} < set(report["versions"])
    scores = {f"{score['set']}/{score['mode']}": score for score in report["scores"]}
    assert list(scores) == [
        "words/sampled",
        "words/greedy",
        "file/sampled",
        "file/greedy",
    ]
    words = scores["words/sampled"]["rewards"]
    assert {task: len(rewards) for task, rewards in words.items()} == {
        "eval-0": 4,
        "eval-1": 4,
    }
    assert all(0.0 <= reward <= 1.0 for rewards in words.values() for reward in rewards)
    assert any(reward > 0 for rewards in words.values() for reward in rewards)
    assert len(scores["words/greedy"]["rewards"]["eval-0"]) == 1
    failed = scores["file/sampled"]
    assert failed["failures"] == {"exception": 4}
    assert failed["rewards"]["b"] == [0.0] * 4
    mean = sum(map(sum, failed["rewards"].values())) / 8
    assert failed["reward_mean"]["value"] == pytest.approx(mean, abs=1e-12)
    assert {"accuracy", "pass_at_1", "pass_at_2", "pass_at_4"} < set(failed)
    assert "file   sampled  2      8        failed: exception" in done.stdout
    left = [
        p.info
        for p in psutil.process_iter(["pid", "cmdline"])
        if str(run) in str(p.info["cmdline"])
    ]
    assert not left


def test_eval_table_has_a_line_per_measure() -> None:
    score = EvalScore(
        mode="sampled",
        task_ids=("a", "b"),
        rewards=((1.0, 0.0), (0.5, 1.0)),
        failures={"timeout": 1},
    )
    lines = table([score]).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["set", *"-----"]
    assert [line.split()[2:] for line in lines[1:3]] == [
        ["2", "4", "reward_mean", "0.625", "[0.500,", "0.750]"],
        ["2", "4", "accuracy", "0.500", "[0.150,", "0.850]"],
    ]
    assert lines[-1].endswith("failed: timeout  1")
