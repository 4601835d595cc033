"""A run that is killed and goes on makes, bit for bit, the steps of one that was never
stopped. Its checkpoints are written beside training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.runs import DEADLINE_S, ROOT, flags, steps_of, train
from invrl.buffer.ledger.ledger_store import read_incarnations
from invrl.cli.commands.replay import MEASURED
from invrl.store.batch_file import batch_path, load_batch
from invrl.store.run_folder import RunFolder

EXACT = (
    *("--engine.seeded-sampling", "--rollout-concurrency", "1", "--workers.count", "1"),
    *(
        "--sglang-max-running-requests",
        "1",
        "--sglang-disable-radix-cache",
        "--max-staleness",
        "0",
    ),
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps", "4"),
    *(
        "--save-interval",
        "2",
        "--save-rollout-data",
        "--lr-decay-style",
        "cosine",
        "--lr-decay-steps",
        "8",
    ),
)
KILLED_IN = 4
"""The step that the driver is killed in: step 3 is made and lost, for the checkpoint is
of step 2."""


def killed(folder: Path, name: str) -> None:
    """The run's command, killed (-9) once it has begun step KILLED_IN."""
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "train",
        *flags(folder, name),
        *EXACT,
        "--checkpoints.background",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL)
    metrics = RunFolder(path=folder / name).metrics_path
    deadline = time.monotonic() + DEADLINE_S / 2
    while not (metrics.exists() and steps_in(metrics) >= KILLED_IN - 1):
        assert driver.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait(120)


def steps_in(metrics: Path) -> int:
    """Rows of steps that trained: whole ones, for another is being written."""
    return sum(
        '"rollout/reward_mean"' in line for line in metrics.read_text().split("\n")[:-1]
    )


def same(row: dict[str, float]) -> dict[str, float]:
    """What a step computes, without what it took."""
    told = (
        "train/",
        "rollout/reward",
        "rollout/response_length",
        "sync/canary_max_gap",
    )
    return {
        n: v
        for n, v in row.items()
        if n.startswith(told) and not n.startswith(MEASURED)
    }


@pytest.mark.timeout(DEADLINE_S)
def test_the_steps_after_a_resume_are_those_of_an_uninterrupted_run(
    folder: Path,
) -> None:
    whole = train(folder, "whole", *EXACT)
    killed(folder, "resumed")
    resumed = train(folder, "resumed", *EXACT, "--checkpoints.background")
    incarnations = read_incarnations(RunFolder(path=resumed).store_path)
    assert [(incarnation.parent, incarnation.step) for incarnation in incarnations] == [
        (0, 0),
        (1, 2),
    ]
    assert [row["step"] for row in steps_of(resumed)] == [1, 2, 3, 4]
    expected = {row["step"]: same(row) for row in steps_of(whole)}
    for row in steps_of(resumed):
        found = same(row)
        differ = [
            name
            for name, value in expected[row["step"]].items()
            if found.get(name) != value
        ]
        assert found.keys() == expected[row["step"]].keys()
        assert not differ, row["step"]
    assert expected[3]["train/lr"] < expected[1]["train/lr"], (
        "the schedule is in the checkpoint"
    )
    for step in range(1, 5):
        one, other = (
            load_batch(batch_path(run / "rollout_data", step))
            for run in (whole, resumed)
        )
        for mine, its in zip(one.samples, other.samples, strict=True):
            assert mine.group_id == its.group_id
            assert mine.attempt == its.attempt
            assert mine.reward == its.reward
            for name in ("tokens_T", "loss_mask_T", "rollout_logprobs_T", "versions_T"):
                assert getattr(mine, name).tobytes() == getattr(its, name).tobytes(), (
                    step,
                    name,
                )
        for mine_T, its_T in zip(one.advantages, other.advantages, strict=True):
            assert mine_T.tobytes() == its_T.tobytes()
    weights = "checkpoints/step-000004/hugging_face/model.safetensors"
    assert (whole / weights).read_bytes() == (resumed / weights).read_bytes()
