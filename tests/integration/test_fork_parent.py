"""The process that forks engines: what becomes of an engine when either of them, or its owner, ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from invrl.engines.config import EngineConfig
from invrl.engines.engine_server import ENGINE_MODULE, EngineServer
from invrl.errors import ServerError
from invrl.host.fork_parent import ForkParent
from invrl.host.process import ENDED, state_of

CONFIG = EngineConfig(engine_dtype="float32", engine_start_timeout_s=500.0)
DEADLINE_S = 60.0
HOLDER = """
import sys, time
from pathlib import Path
from invrl.engines.config import EngineConfig
from invrl.engines.engine_server import ENGINE_MODULE, EngineServer
from invrl.host.fork_parent import ForkParent

model, folder = Path(sys.argv[1]), Path(sys.argv[2])
parent = ForkParent(ENGINE_MODULE, log=folder / "engine-parent.log")
config = EngineConfig(engine_dtype="float32", engine_start_timeout_s=500.0)
server = EngineServer("engine-h", config, model_path=model, run_folder=folder, parent=parent)
server.wait_ready()
print(parent._process.pid, *[process.pid for process in server.processes()], flush=True)
time.sleep(3600)
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[ForkParent]:
    parent = ForkParent(ENGINE_MODULE, log=tmp_path / "engine-parent.log")
    yield parent
    parent.stop()


def until_ended(processes: list[psutil.Process]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while any(state_of(process) != ENDED for process in processes):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_engine_given_up_while_its_parent_imports_never_starts(
    parent: ForkParent, tiny_model: Path, tmp_path: Path
) -> None:
    """And an engine outlives its parent, after which the next one gets a new parent."""
    given_up = EngineServer("given-up", CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=parent)
    server = EngineServer("engine-a", CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=parent)
    given_up.stop()
    try:
        server.wait_ready()
        assert not given_up.log.read_text()
        processes = server.processes()
        assert len(processes) == 3
        assert str(tiny_model) in processes[0].cmdline()
        assert not any(server.api_key in word for word in processes[0].cmdline())

        dead_parent = psutil.Process(parent._process.pid)
        dead_parent.kill()
        until_ended([dead_parent])
        successor = EngineServer(
            "engine-b", CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=parent
        )
        successor.wait_ready()
        successor.stop()
        server.check_alive()
    finally:
        server.stop()
    until_ended(processes)
    assert not server.alive()


@pytest.mark.parametrize("parent_is_gone", [False, True], ids=["with its parent", "orphan"])
def test_engine_dies_with_the_process_that_holds_it(
    parent_is_gone: bool, tiny_model: Path, tmp_path: Path
) -> None:
    """As after kill -9, when nothing of the holder runs any more."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tiny_model), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    pids = [int(number) for number in holder.stdout.readline().split()]
    parent, *engine = [psutil.Process(pid) for pid in pids]
    if parent_is_gone:
        parent.kill()
        until_ended([parent])
        assert all(process.is_running() for process in engine)
    holder.kill()
    holder.wait()
    until_ended([parent, *engine])


def test_death_of_an_engine_is_seen_with_its_signal_and_the_others_live_on(
    engine_parent: ForkParent, tiny_model: Path, tmp_path: Path
) -> None:
    names = ["engine-c", "engine-d"]
    killed, other = (
        EngineServer(name, CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=engine_parent)
        for name in names
    )
    try:
        killed.wait_ready()
        other.wait_ready()
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(ServerError, match=r"engine-c ended with code -9"):
            killed.wait_until(lambda: False, deadline_s=DEADLINE_S)
        other.check_alive()
    finally:
        killed.stop()
        other.stop()


def test_parent_that_cannot_import_sglang_says_why(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken" / "sglang"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('half installed')")
    paths = [str(broken.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    parent = ForkParent(ENGINE_MODULE, log=tmp_path / "engine-parent.log")
    server = EngineServer("engine-e", CONFIG, model_path=tiny_model, run_folder=tmp_path, parent=parent)
    try:
        with pytest.raises(ServerError, match=r"(?s)engine-e did not start.*half installed"):
            server.wait_ready()
    finally:
        server.stop()
        parent.stop()
