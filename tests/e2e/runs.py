"""Starts `invrl` as a user does, on a tiny random model: SGLang, router, gateway, Ray,
Megatron, all real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
STEPS = 20
"""Of trivial.toml. A policy of luck starts slowly now and then; twice the usual time to
learn is enough."""
DEADLINE_S = 1800


def invrl(folder: Path, *arguments: str, python_path: str = str(ROOT)) -> str:
    """What the command printed. It must exit with 0."""
    return run_python(folder, "-m", "invrl.cli", *arguments, python_path=python_path)


def run_benchmark(folder: Path, name: str, *arguments: str) -> str:
    """What `python -m benchmarks.NAME` printed. It must exit with 0."""
    return run_python(
        folder, "-m", f"benchmarks.{name}", *arguments, python_path=str(ROOT)
    )


def run_python(folder: Path, *arguments: str, python_path: str) -> str:
    env = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=folder,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, (
        f"{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
    )
    return process.stdout


def flags(folder: Path, name: str) -> list[str]:
    """Of a run of this name on a tiny model in `folder`."""
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model)
    place = ["--run-root", str(folder), "--run-name", name]
    return [
        "--config",
        str(ROOT / "tests/e2e/trivial.toml"),
        "--model-path",
        str(model),
        *place,
    ]


def train(folder: Path, name: str, *more: str, python_path: str = str(ROOT)) -> Path:
    """Run `invrl train` to its end; the run folder."""
    invrl(folder, "train", *flags(folder, name), *more, python_path=python_path)
    return folder / name


def steps_of(run: Path) -> list[dict[str, float]]:
    """The rows of the steps that trained."""
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    return [row for row in rows if "rollout/reward_mean" in row]


NO_SGLANG = """\
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang", "sglang_router", "sgl_kernel"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Refuse())
"""
"""A sitecustomize.py of a Python that cannot import SGLang."""
