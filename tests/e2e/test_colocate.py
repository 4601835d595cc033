"""`--colocate`: engines and trainer by turns make, bit for bit, the steps of a run in
which they are there at the same time; also from a checkpoint, which is saved while the
trainer sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from e2e.runs import DEADLINE_S, steps_of, train

pytestmark = pytest.mark.slow

EXACT = (
    *("--engine.seeded-sampling", "--rollout-concurrency", "1", "--workers.count", "1"),
    *(
        "--sglang-max-running-requests",
        "1",
        "--sglang-disable-radix-cache",
        "--max-staleness",
        "0",
    ),
    *(
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "4",
        "--eval.tasks",
        "2",
        "--deterministic",
    ),
)
COMPUTED = (
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "rollout/reward_mean",
    "sync/canary_max_gap",
)


def computed(run: Path) -> list[dict[str, float]]:
    return [{name: row[name] for name in COMPUTED} for row in steps_of(run)]


@pytest.mark.timeout(DEADLINE_S)
def test_colocated_run_takes_the_same_steps_as_a_run_without_gpu_turns(
    folder: Path,
) -> None:
    beside = train(folder, "beside", *EXACT, "--num-steps", "4")
    train(folder, "turns", *EXACT, "--colocate", "--num-steps", "2")
    turns = train(folder, "turns", *EXACT, "--colocate", "--num-steps", "4")
    assert computed(turns) == computed(beside)
    assert all(row["train/optimizer_steps"] == 1 for row in steps_of(turns)), (
        "nothing was learnt"
    )
    for step in steps_of(turns):
        assert {"sync/sleep_s", "sync/wake_s", "time/gpu_turn_s"} <= step.keys()
        assert step["sync/paused_s"] > step["time/train_s"]
    weights = load_file(
        turns / "checkpoints/step-000004/hugging_face/model.safetensors"
    )
    expected = load_file(
        beside / "checkpoints/step-000004/hugging_face/model.safetensors"
    )
    assert weights.keys() == expected.keys()
    assert all((weights[name] == expected[name]).all() for name in weights)
