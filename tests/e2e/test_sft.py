"""`invrl train` on files: sft lowers the held-out loss, goes on after a kill as if
nothing had happened, and is the first stage of the next run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_model import make_tiny_model

from e2e.runs import DEADLINE_S, NO_SGLANG, ROOT, invrl
from invrl.cli.commands.replay import MEASURED
from invrl.store.timeline_file import read_timeline

STEPS = 10
KILLED_AFTER = 7
"""Steps that are made when the run is killed: the newest checkpoint is of step 6."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a file of sums."""
    place = tmp_path_factory.mktemp("sft with spaces")
    make_tiny_model(place / "model")
    rng = random.Random(0)
    lines: list[str] = []
    for _ in range(
        500
    ):  # long enough that a step takes a while, in which a run can be killed
        numbers = [rng.randrange(100) for _ in range(20)]
        messages = [
            {"role": "user", "content": "+".join(map(str, numbers))},
            {"role": "assistant", "content": f"= {sum(numbers)}"},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    (place / "sums.jsonl").write_text("".join(lines))
    return place


def flags(name: str) -> list[str]:
    return [
        *(
            "--objective",
            "sft",
            "--data-path",
            "sums.jsonl",
            "--data.eval-fraction",
            "0.2",
        ),
        *(
            "--model-path",
            "model",
            "--run-root",
            "runs",
            "--run-name",
            name,
            "--log.progress",
            "plain",
        ),
        *("--num-steps", str(STEPS), "--data.batch-size", "200"),
        *(
            "--eval.interval",
            "5",
            "--save-interval",
            "3",
            "--metrics.sample-interval-s",
            "0.2",
        ),
        *(
            "--train-dtype",
            "float32",
            "--lr",
            "3e-3",
            "--lr-decay-style",
            "cosine",
            "--lr-decay-steps",
            "12",
        ),
    ]


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    return {row["step"]: row for row in rows}


def computed(row: dict[str, float]) -> dict[str, float]:
    """What a step computes, without what it took."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith(("train/", "eval/", "data/"))
        and not name.startswith(MEASURED)
    }


def wait_for_rows(driver: subprocess.Popen, run: Path, number: int) -> None:
    """Until the run's metrics have that many rows."""
    deadline = time.monotonic() + DEADLINE_S / 2
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < number:
        assert driver.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted, on a Python that cannot import sglang."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "sitecustomize.py").write_text(NO_SGLANG)
    said = invrl(place, "train", *flags("whole"), python_path=f"{modules}:{ROOT}")
    assert "[[= " in said, "an example shows what is trained"
    assert "held-out loss (100 rows, " in said
    return place / "runs" / "whole"


@pytest.mark.timeout(DEADLINE_S)
def test_sft_lowers_the_held_out_loss(whole: Path) -> None:
    rows = rows_of(whole)
    losses = {
        step: row["eval/loss"] for step, row in rows.items() if "eval/loss" in row
    }
    assert list(losses) == [0, 5, 10]
    assert losses[10] < losses[5] < losses[0]
    assert losses[10] < 0.5 * losses[0]
    assert rows[6]["data/epoch"] == 3.0
    assert (whole / "checkpoints/step-000010/hugging_face/model.safetensors").is_file()
    assert not list((whole / "logs").glob("engine*"))
    assert not (whole / "run.sqlite").exists()


def test_timeline_of_a_run_on_files_has_phases_and_memory(whole: Path) -> None:
    timeline = read_timeline(whole)
    assert {"starting", "train", "checkpoint", "evaluating"} <= {
        span.name for span in timeline.spans
    }
    assert {span.step for span in timeline.spans if span.name == "train"} == set(
        range(1, STEPS + 1)
    )
    assert any(span.parts for span in timeline.spans if span.name == "train")
    assert timeline.samples
    assert {"driver", "rank-0"} <= set(timeline.samples[-1].memory)
    assert timeline.samples[-1].gateway is None


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_killed_run_on_files_resumes_bit_for_bit(place: Path, whole: Path) -> None:
    run = place / "runs" / "killed"
    command = [sys.executable, "-m", "invrl.cli", "train", *flags("killed")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(command, env=env, cwd=place, stdout=subprocess.DEVNULL)
    wait_for_rows(driver, run, KILLED_AFTER + 1)
    driver.send_signal(signal.SIGKILL)
    driver.wait(120)
    assert not (run / "finished").exists()
    said = invrl(place, "resume", str(run))
    assert "resuming from the checkpoint of step " in said
    expected = rows_of(whole)
    for step, row in rows_of(run).items():
        assert computed(row) == computed(expected[step]), step
    weights = "checkpoints/step-000010/hugging_face/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert "the run is finished" in invrl(place, "resume", str(run))


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_an_interrupted_run_resumes_where_it_was(place: Path) -> None:
    """Ctrl-C in the terminal, before a checkpoint was due."""
    run = place / "runs" / "interrupted"
    command = [sys.executable, "-m", "invrl.cli", "train", *flags("interrupted")]
    command += ["--num-steps", "100", "--save-interval", "100"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        command, env=env, cwd=place, stdout=subprocess.PIPE, text=True
    )
    wait_for_rows(driver, run, 3)
    driver.send_signal(signal.SIGINT)
    said, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130
    saved = sorted((run / "checkpoints").glob("step-*"))[-1]
    step = int(saved.name[-6:])
    assert step >= 2
    assert f"a run resumes from step {step}" in said
    assert (saved / "hugging_face/model.safetensors").is_file()
    left = [
        process.info
        for process in psutil.process_iter(["pid", "cmdline"])
        if str(run) in str(process.info["cmdline"])
    ]
    assert not left
    said = invrl(place, "resume", str(run), "--num-steps", str(step + 1))
    assert f"resuming from the checkpoint of step {step} of {step + 1}" in said
    last_row = (run / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last_row)["step"] == step + 1


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_next_run_begins_with_the_weights_of_a_run_folder(
    place: Path, whole: Path
) -> None:
    """It begins with the weights that the run before ended with: the held-out loss says
    so."""
    second = [flag if flag != "model" else str(whole) for flag in flags("second")]
    invrl(place, "train", *second, "--num-steps", "1")
    first_row, _ = [
        json.loads(line)
        for line in (place / "runs/second/metrics.jsonl").read_text().splitlines()
    ]
    assert first_row["eval/loss"] == rows_of(whole)[STEPS]["eval/loss"]
    settled = (place / "runs/second/config.resolved.toml").read_text()
    assert f'model_path = "{whole}/checkpoints/step-000010"' in settled


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_preferences_lower_their_held_out_loss(
    place: Path, whole: Path, objective: str
) -> None:
    """After the first stage, as they are used: right sums are preferred to wrong
    ones."""
    lines: list[str] = []
    for line in (place / "sums.jsonl").read_text().splitlines()[:80]:
        question, answer = json.loads(line)["messages"]
        right = answer["content"]
        wrong = "a lot"
        if objective != "kto":
            rows = [{"prompt": question["content"], "chosen": right, "rejected": wrong}]
        else:
            rows = [
                {
                    "prompt": question["content"],
                    "completion": text,
                    "label": text == right,
                }
                for text in (right, wrong)
            ]
        lines += [json.dumps(row) + "\n" for row in rows]
    (place / f"{objective}.jsonl").write_text("".join(lines))
    given = [
        *(
            "--objective",
            objective,
            "--data-path",
            f"{objective}.jsonl",
            "--data.eval-fraction",
            "0.2",
        ),
        *(
            "--model-path",
            str(whole),
            "--run-root",
            "runs",
            "--run-name",
            objective,
            "--log.progress",
            "plain",
        ),
        *(
            "--num-steps",
            "6",
            "--data.batch-size",
            "16",
            "--train-dtype",
            "float32",
            "--lr",
            "1e-3",
        ),
    ]
    invrl(place, "train", *given)
    rows = [
        json.loads(line)
        for line in (place / "runs" / objective / "metrics.jsonl")
        .read_text()
        .splitlines()
    ]
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    at_reference = {"dpo": math.log(2), "ipo": 25.0, "kto": 0.5}
    if objective in at_reference:
        assert losses[0] == pytest.approx(at_reference[objective], abs=1e-3), (
            "the policy is the reference"
        )
    # Most of ORPO's loss is the likelihood of the sum's digits, which six steps do not
    # teach.
    assert losses[6] < (0.9 if objective == "orpo" else 0.8) * losses[0]


@pytest.mark.timeout(DEADLINE_S)
def test_resume_refuses_a_changed_data_file(place: Path, whole: Path) -> None:
    file = place / "sums.jsonl"
    content = file.read_text()
    file.write_text(content + content.splitlines(keepends=True)[0])
    try:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "invrl.cli",
            "resume",
            str(whole),
            "--num-steps",
            "12",
        ]
        process = subprocess.run(
            command, env=env, cwd=place, timeout=300, capture_output=True, text=True
        )
    finally:
        file.write_text(content)
    assert process.returncode == 2
    assert "it has changed since the run began" in process.stderr
