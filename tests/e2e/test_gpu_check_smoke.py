"""The stages of `launch/gpu`, small and on a CPU (`SMOKE=1`): their code is not first
run on a rented card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import first_quick

from gpu_check.stages import STAGES

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500
RUNS = [
    ["machine", "same_step"],
    ["machine", "logprobs", "flex", "offload", "ipc_bucket"],
    ["speed", "experts", "ipc_arena"],
    ["engine"],
    ["loop"],
    ["colocate"],
]


def test_every_stage_of_the_kit_has_a_smoke_run() -> None:
    assert {name for stages in RUNS for name in stages} == set(STAGES)


@pytest.mark.parametrize("stages", first_quick(RUNS), ids=" ".join)
def test_stages_pass_without_a_card(tmp_path: Path, stages: list[str]) -> None:
    python_path = f"{ROOT / 'launch' / 'gpu'}{os.pathsep}{ROOT}"
    environment = {
        **os.environ,
        "PYTHONPATH": python_path,
        "SMOKE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "gpu_check",
        *stages,
        "--out",
        str(tmp_path),
        "--work",
        str(tmp_path),
    ]
    process = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert process.returncode == 0, (
        f"{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
    )
    written = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    states = {name: stage["state"] for name, stage in written.items()}
    for name in stages:
        if name == "machine":
            assert states.pop(name) == "skipped"
            assert written[name]["reason"] == "a smoke run has no card"
        else:
            assert states.pop(name) == "passed"
            assert written[name]["results"]
    assert not states
