"""Either half of the loop alone, and one step again, against a live run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from e2e.runs import DEADLINE_S, NO_SGLANG, ROOT, STEPS, invrl, steps_of, train
from invrl.cli.commands.replay import MEASURED
from invrl.store.batch_file import batch_path, load_batch

INTERVAL = 4
"""Steps between the checkpoints of the live run."""


@pytest.fixture
def saved(learned: Path) -> int:
    """The first checkpoint whose next step moved the weights: a step of equal rewards
    alone proves little."""
    moved = {row["step"]: row["train/optimizer_steps"] > 0 for row in steps_of(learned)}
    return next(step for step in range(INTERVAL, STEPS, INTERVAL) if moved[step + 1])


def train_metrics(row: dict[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name.startswith("train/") and not name.startswith(MEASURED)
    }


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_the_trainer_alone_repeats_a_live_run_bit_for_bit(
    learned: Path, saved: int, folder: Path, tmp_path: Path
) -> None:
    """From a checkpoint, on a Python that cannot import sglang: steps that move the
    weights and, once every reply is as wanted, steps that do not."""
    (tmp_path / "sitecustomize.py").write_text(NO_SGLANG)
    alone = train(
        folder,
        "alone",
        "--debug-train-only",
        *("--load-rollout-data", str(learned / "rollout_data")),
        *("--load-checkpoint", str(learned / f"checkpoints/step-{saved:06}")),
        python_path=f"{tmp_path}:{ROOT}",
    )
    live = {row["step"]: train_metrics(row) for row in steps_of(learned)}
    rows = [
        json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()
    ]
    steps = range(saved + 1, STEPS + 1)
    assert [row["step"] for row in rows] == list(steps)
    assert len(live[saved + 1]) > 10
    assert {row["step"]: train_metrics(row) for row in rows} == {
        step: live[step] for step in steps
    }
    weights = f"checkpoints/step-{STEPS:06}/hugging_face/model.safetensors"
    assert (alone / weights).read_bytes() == (learned / weights).read_bytes()
    assert not list((alone / "logs").glob("engine*"))


@pytest.mark.timeout(DEADLINE_S)
def test_replay_repeats_a_step_and_writes_out_every_token(
    learned: Path, saved: int, folder: Path
) -> None:
    said = invrl(folder, "replay", str(learned), "--step", str(saved + 1))
    result = json.loads(
        (learned / f"replay/step-{saved + 1:06}/result.json").read_text()
    )
    assert result["differ"] == []
    assert "recorded metrics are equal bit for bit" in said
    batch = load_batch(batch_path(learned / "rollout_data", saved + 1))
    rows = [
        json.loads(line)
        for line in (learned / f"replay/step-{saved + 1:06}/tokens.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [row["ids"] for row in rows] == [
        sample.tokens_T.tolist() for sample in batch.samples
    ]
    gaps = [
        abs(before - engine)
        for row in rows
        for before, engine, trained in zip(
            row["logprob_before"], row["engine_logprob"], row["trained"], strict=True
        )
        if trained
    ]
    assert len(gaps) == batch.trained.tokens
    assert max(gaps) <= 1e-3
    assert any(row["logprob_before"] != row["logprob_after"] for row in rows), (
        "the step changed the policy"
    )
    assert not (learned / f"checkpoints/step-{saved + 1:06}").exists()


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_rollouts_alone_fill_a_folder_that_a_trainer_can_read(folder: Path) -> None:
    run = train(folder, "rollouts", "--debug-rollout-only", "--num-steps", "3")
    batches = [load_batch(batch_path(run / "rollout_data", step)) for step in (1, 2, 3)]
    rollouts = [{sample.rollout_id for sample in batch.samples} for batch in batches]
    assert all(len(of_batch) == 32 for of_batch in rollouts)
    assert not rollouts[0] & rollouts[1]
    versions = {
        int(v)
        for b in batches
        for s in b.samples
        for v in np.unique(s.versions_T[s.loss_mask_T])
    }
    assert versions == {0}
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not [name for name in rows[0] if name.startswith("train/")]
    assert not list((run / "checkpoints").iterdir())
    trained = train(
        folder,
        "on-those",
        "--debug-train-only",
        "--load-rollout-data",
        str(run / "rollout_data"),
    )
    assert (trained / "checkpoints/step-000003/hugging_face/model.safetensors").exists()


@pytest.mark.timeout(DEADLINE_S)
def test_ledger_command_lists_where_every_rollout_ended(
    learned: Path, folder: Path
) -> None:
    said = invrl(folder, "ledger", str(learned))
    assert "1 incarnation:" in said
    assert f"{STEPS * 32}  trained" in said
    assert "ends once: yes" in said
    of_task = invrl(folder, "ledger", str(learned), "train-0")
    assert of_task.count("batch 0") >= 8
