"""A run that is killed and resumes from an earlier checkpoint makes, bit for bit, the
steps that it made before. Its checkpoints are written beside training."""

from __future__ import annotations

import os
import shutil
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
    *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    *(
        "--save-interval",
        "2",
        "--save-rollout-data",
        "--lr-decay-style",
        "cosine",
        "--lr-decay-steps",
        "8",
        "--checkpoints.background",
    ),
)
FOURTH = "checkpoints/step-000004"


ADAPTER = (
    *("--lora.rank", "4", "--lr", "5e-3"),
    *("--weights.transport", "adapter"),
)


def killed(folder: Path, name: str, *more: str) -> Path:
    """Return the folder of a run that was killed (-9) in a step after the fourth, whose
    checkpoint it has."""
    command = [
        sys.executable,
        "-m",
        "invrl.cli",
        "train",
        *flags(folder, name),
        *EXACT,
        *more,
        *("--num-steps", "100"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL)
    run = folder / name
    deadline = time.monotonic() + DEADLINE_S / 2
    while not (run / FOURTH).exists():
        assert driver.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait(120)
    return run


def taken_back(run: Path, kept: Path) -> None:
    """Moves what the run made after its checkpoint of step 2 to `kept`."""
    (kept / "checkpoints").mkdir(parents=True)
    shutil.copytree(run / "rollout_data", kept / "rollout_data")
    whole_lines, _, _ = (run / "metrics.jsonl").read_text().rpartition("\n")
    (kept / "metrics.jsonl").write_text(whole_lines)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name > "step-000002":
            shutil.move(checkpoint, kept / "checkpoints")


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
@pytest.mark.parametrize(
    ("run_name", "more", "weights"),
    [
        ("resumed", (), "model.safetensors"),
        pytest.param(
            "resumed adapter",
            ADAPTER,
            "adapter_model.safetensors",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["model", "adapter"],
)
def test_the_steps_after_a_resume_are_those_that_were_lost(
    folder: Path, tmp_path: Path, run_name: str, more: tuple[str, ...], weights: str
) -> None:
    run = killed(folder, run_name, *more)
    taken_back(run, tmp_path / "first")
    first = tmp_path / "first"
    train(folder, run_name, *EXACT, *more, "--num-steps", "4")
    incarnations = read_incarnations(RunFolder(path=run).store_path)
    assert [(incarnation.parent, incarnation.step) for incarnation in incarnations] == [
        (0, 0),
        (1, 2),
    ]
    assert [row["step"] for row in steps_of(run)] == [1, 2, 3, 4]
    expected = {row["step"]: same(row) for row in steps_of(first)}
    for row in steps_of(run):
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
    for step in (3, 4):
        one, other = (
            load_batch(batch_path(made / "rollout_data", step)) for made in (first, run)
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
    saved = f"{FOURTH}/hugging_face/{weights}"
    assert (first / saved).read_bytes() == (run / saved).read_bytes()
