"""`invrl serve` and `invrl eval`, killed and interrupted: nothing that they started is
left, and what ended an evaluation is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from slow_cases import first_quick

from invrl.host.processes.process import still_running

ROOT = Path(__file__).parents[2]
HUNG = """
import threading
from pathlib import Path

def rollout(task, endpoint):
    Path(task.payload["began"]).touch()
    threading.Event().wait()
"""
GONE_WITHIN_S = 300.0
Start = Callable[..., "Command"]


class Command:
    """A command of ours, its lines as they come, and everything below it that has been
    seen."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.lines: list[str] = []
        self.family: dict[int, psutil.Process] = {}
        paths = os.pathsep.join([str(folder), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "invrl.cli", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            process_group=0,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self.look()
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}:\n{self.said}")

    def look(self) -> list[psutil.Process]:
        """What lives below it now."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.family.update({process.pid: process for process in found})
        return found

    def wait_for(self, name: str) -> psutil.Process:
        """A process below it that is called so; it must come, or the test's own
        deadline does."""
        pause = threading.Event()
        while self.process.poll() is None:
            for process in self.look():
                try:
                    if name in " ".join([process.name(), *process.cmdline()[:1]]):
                        return process
                except psutil.Error:
                    continue
            pause.wait(0.005)
        raise AssertionError(f"it ended without a process {name}:\n{self.said}")

    def driver(self, command: str) -> psutil.Process:
        """Its child that runs `invrl COMMAND`; another forks engines."""
        children = psutil.Process(self.process.pid).children()
        [driver] = [child for child in children if command in child.cmdline()]
        return driver

    def end(self) -> int:
        """Its exit code, once everything that was seen below it is gone."""
        rest, _ = self.process.communicate()
        self.lines.append(rest)
        left = still_running(self.family.values(), within_s=GONE_WITHIN_S)
        assert not left, f"{left}\n{self.said}"
        return self.process.returncode

    @property
    def said(self) -> str:
        return "".join(self.lines)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Command] = []

    def start(*arguments: str) -> Command:
        made.append(
            Command(
                [*arguments, "--run-root", str(tmp_path), "--run-name", "run"], tmp_path
            )
        )
        return made[-1]

    yield start
    for command in made:
        if command.process.poll() is None:
            command.process.kill()
            command.process.communicate()


@pytest.fixture
def evaluation(start: Start, tmp_path: Path, tiny_model: Path) -> Callable[[], Command]:
    """With a rollout that hangs; `began` is there once it does."""

    def begin() -> Command:
        (tmp_path / "hung.py").write_text(HUNG)
        (tmp_path / "tasks.jsonl").write_text(
            f'{{"id": "a", "began": "{tmp_path / "began"}"}}\n'
        )
        return start(
            "eval",
            *("--model-path", str(tiny_model)),
            *("--rollout-function-path", "hung:rollout"),
            *("--task-file", str(tmp_path / "tasks.jsonl")),
            *("--engine.dtype", "float32"),
            *("--rollout-timeout-s", "3000"),
        )

    return begin


def wait_for_file(path: Path, command: Command) -> None:
    pause = threading.Event()
    while not path.exists():
        assert command.process.poll() is None, command.end()
        pause.wait(0.05)
    command.look()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", first_quick([signal.SIGKILL, signal.SIGINT]))
@pytest.mark.parametrize("moment", first_quick(["while it serves", "while it starts"]))
def test_killed_or_interrupted_serve_leaves_no_process(
    start: Start, tiny_model: Path, moment: str, kind: signal.Signals
) -> None:
    command = start(
        "serve", "--model-path", str(tiny_model), "--engine.dtype", "float32"
    )
    command.read_until("starting 1 engine")
    if moment == "while it serves":
        command.read_until("INVRL_ENV_KEY=")
    assert command.wait_for("python") is not None
    command.process.send_signal(kind)
    assert command.end() == (-signal.SIGKILL if kind is signal.SIGKILL else 130)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["supervisor", "driver", "raylet"])
def test_eval_whose_driver_or_raylet_is_killed_leaves_no_process_and_names_the_cause(
    evaluation: Callable[[], Command], tmp_path: Path, victim: str
) -> None:
    command = evaluation()
    command.read_until("everything is up")
    wait_for_file(tmp_path / "began", command)
    raylet = command.wait_for("raylet")
    if victim == "supervisor":
        command.process.kill()
    elif victim == "driver":
        command.driver("_evaluation").kill()
    else:
        raylet.kill()
    code = command.end()
    if victim == "supervisor":
        assert code == -signal.SIGKILL
        return
    assert code == 1
    if victim == "driver":
        assert "the driver was ended by SIGKILL" in command.said
    else:
        assert (
            f"Ray's raylet (process {raylet.pid}) was killed by SIGKILL" in command.said
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interrupt_ends_an_evaluation_whose_ray_does_not_start(
    evaluation: Callable[[], Command],
) -> None:
    """Its GCS is stopped as soon as it exists; Ray itself would wait for minutes, and
    hears no signal."""
    command = evaluation()
    gcs = command.wait_for("gcs_server")
    gcs.suspend()
    command.process.send_signal(signal.SIGINT)
    assert command.end() == 130
    assert (
        "interrupted during the start of Ray, which does not react to signals: the driver was killed"
        in command.said
    )
