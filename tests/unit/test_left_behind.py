"""A session of tests says what it has left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]
CONFTEST = """
from left_behind import LeftBehind

def pytest_configure(config):
    config.pluginmanager.register(LeftBehind())
"""
LEAVES = """
import os, subprocess, sys, tempfile
from pathlib import Path

def test_leaves_something():
    open(tempfile.gettempdir() + "/a forgotten file", "w").close()
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    Path("pid").write_text(str(daemon.pid))
    Path(f"/dev/shm/torch_{os.getpid()}_invrl_test").touch()
"""
CLEAN = """
import tempfile

def test_leaves_nothing(tmp_path):
    (tmp_path / "kept by pytest").touch()
    with tempfile.TemporaryDirectory():
        pass
"""


def run_session(folder: Path, test: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_one.py").write_text(test)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        "PYTEST_DEBUG_TEMPROOT": str(folder),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_one.py",
    ]
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_files_processes_and_shared_memory_are_named(tmp_path: Path) -> None:
    printed = run_session(tmp_path, LEAVES)
    pid = int((tmp_path / "pid").read_text())
    psutil.Process(pid).kill()
    [shared] = Path("/dev/shm").glob("torch_*_invrl_test")
    shared.unlink()
    assert "left behind by these tests" in printed
    assert "in TMPDIR: a forgotten file" in printed
    assert f"process {pid}: " in printed
    assert f"in shared memory: {shared}" in printed


def test_nothing_is_said_of_a_session_that_leaves_nothing(tmp_path: Path) -> None:
    assert "left behind" not in run_session(tmp_path, CLEAN)
