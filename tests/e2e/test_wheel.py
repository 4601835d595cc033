"""The built wheel, outside of a checkout: a new project trains as `invrl init` writes
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import make_tiny_model
from wheel import build_wheel

from e2e.runs import DEADLINE_S

pytestmark = pytest.mark.slow


class Installed:
    """invrl's wheel in a folder of its own, with the packages of this environment
    beside it."""

    def __init__(self, folder: Path) -> None:
        self._site = folder / "site"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run(
            [*pip, "--target", str(self._site), str(build_wheel(folder))],
            check=True,
            timeout=300,
        )
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self._site),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, folder: Path, *command: str) -> str:
        """What the command printed in `folder`. It must exit with 0."""
        process = subprocess.run(
            command,
            cwd=folder,
            env=self._environment,
            timeout=DEADLINE_S,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, (
            f"{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
        )
        return process.stdout

    def invrl(self, folder: Path, *arguments: str) -> str:
        return self.run(folder, str(self._site / "bin" / "invrl"), *arguments)

    def holds(self, file: str) -> bool:
        return Path(file).is_relative_to(self._site)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


def test_new_project_trains_with_the_installed_wheel(
    installed: Installed, tmp_path: Path
) -> None:
    location = installed.run(
        tmp_path, sys.executable, "-c", "import invrl; print(invrl.__file__)"
    )
    assert installed.holds(location.strip()), "the wheel, not the checkout"

    installed.invrl(tmp_path, "init", "project")
    project = tmp_path / "project"
    model = make_tiny_model(tmp_path / "tiny")
    flags = [
        "--config",
        "my_task.toml",
        "--model-path",
        str(model),
        "--run-root",
        str(tmp_path / "runs"),
    ]
    short = [
        "--run-name",
        "first",
        "--num-steps",
        "2",
        "--eval.tasks",
        "2",
        "--eval.samples-per-task",
        "1",
    ]
    installed.invrl(project, "train", *flags, *short)
    assert (tmp_path / "runs" / "first" / "finished").read_text() == "2"
