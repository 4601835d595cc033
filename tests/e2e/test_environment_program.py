"""A run that starts its environment, whose process is killed in the middle."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
import time
from pathlib import Path

import psutil
import pytest

from e2e.runs import DEADLINE_S, ROOT, flags, invrl, steps_of

TOY = ROOT / "tests" / "toy_environment"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(DEADLINE_S)]


def toy_programs() -> list[psutil.Process]:
    """The processes in which episodes of the toy run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if str(TOY) in command and any(
            part.endswith("episodes.py") for part in command
        ):
            found.append(process)
    return found


def num_open(run: Path) -> int:
    """Sessions that are open: of episodes that wait for the model, or pause."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as store:
        query = "SELECT COUNT(*) FROM sessions WHERE state='open'"
        return store.execute(query).fetchone()[0]


def kill_in_an_episode(run: Path, killed: list[int]) -> None:
    """Kill the program after the first step, while it plays episodes."""
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        metrics = run / "metrics.jsonl"
        programs = toy_programs()
        if metrics.exists() and steps_of(run) and programs and num_open(run):
            with contextlib.suppress(psutil.NoSuchProcess):
                programs[0].send_signal(signal.SIGKILL)
                killed.append(programs[0].pid)
                return
        time.sleep(0.05)


def test_a_killed_environment_is_started_again_and_every_lease_has_one_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    invrl(tmp_path, "environment", "install", str(TOY))
    run = tmp_path / "run"
    killed: list[int] = []
    killer = threading.Thread(
        target=kill_in_an_episode, args=(run, killed), daemon=True
    )
    killer.start()
    environment = ["--environment", str(TOY), "--environment.args", "pause_s=0.5"]
    no_user_code = ["--no-rollout-function-path", "--no-task-source-path"]
    size = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "2"]
    invrl(
        tmp_path,
        "train",
        *flags(tmp_path, "run"),
        *environment,
        *no_user_code,
        *size,
        "--num-steps",
        "4",
    )
    assert killed
    assert len(steps_of(run)) == 4
    log = (run / "logs" / "environment.log").read_text()
    assert "ended with code -9" in log
    assert log.count("it is started again") == 1
    # checks that every rollout ended once
    ledger = invrl(tmp_path, "ledger", str(run))
    assert "environment_gone" in ledger
    assert toy_programs() == []
