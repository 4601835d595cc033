"""What a process forks that has imported a server's module: the same as one that was
started alone."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from invrl.errors import ServerError
from invrl.host.processes import fork_parent
from invrl.host.processes.fork_parent import EarlyParent, ForkParent
from invrl.host.processes.process import (
    ENDED,
    PYTHON_MODULE,
    ServerProcess,
    process_state,
)

MODULE = "forked_echo"
DEADLINE_S = 60.0
HOLDER = """
import sys, time
from pathlib import Path
from invrl.host.processes.fork_parent import ForkParent
from invrl.host.processes.process import PYTHON_MODULE, ServerProcess

folder = Path(sys.argv[1])
parent = ForkParent("forked_echo", log=folder / "parent.log")
command = [*PYTHON_MODULE, "forked_echo", "sleep"]
server = ServerProcess("echo", command, log=folder / "echo.log", parent=parent)
print(parent._process.pid, server.pid, flush=True)
time.sleep(3600)
"""
Fork = Callable[..., ServerProcess]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is among the tests."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # whatever the user's is
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[ForkParent]:
    parent = ForkParent(MODULE, log=tmp_path / "parent.log")
    yield parent
    parent.stop()


@pytest.fixture
def fork(parent: ForkParent, tmp_path: Path) -> Iterator[Fork]:
    servers: list[ServerProcess] = []

    def fork(what: str, *arguments: str, **options: Any) -> ServerProcess:
        command = [*PYTHON_MODULE, MODULE, what, *arguments]
        log = tmp_path / f"echo-{len(servers)}.log"
        servers.append(
            ServerProcess("echo", command, log=log, parent=parent, **options)
        )
        return servers[-1]

    yield fork
    for server in servers:
        server.stop()


def eventually(holds: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def facts(server: ServerProcess) -> dict[str, Any]:
    eventually(lambda: "\n" in server.log.read_text())
    return ast.literal_eval(server.log.read_text().splitlines()[0])


def test_fork_has_what_a_process_started_alone_has(
    fork: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read_end, write_end = os.pipe()
    server = fork("sleep", str(write_end), env={"GIVEN": "ünicode"}, keep=[write_end])
    os.close(write_end)
    assert os.read(read_end, 100) == b"written by the fork"
    assert os.read(read_end, 100) == b"", "the parent keeps no copy"
    os.close(read_end)
    assert facts(server) == {
        "imported here": False,
        "folder": str(tmp_path),
        "GIVEN": "ünicode",
        "PREPARED": "by the module",
        "group": True,
        "threads of libraries": "1",
    }
    command = " ".join(psutil.Process(server.pid).cmdline()).split()
    assert command[:3] == [sys.executable, "-m", MODULE]
    assert "sleep" in command


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("fail", 3),
        ("done", 0),
        ("kill", -9),
    ],
)
def test_fork_ends_with_its_own_exit_code(fork: Fork, end: str, code: int) -> None:
    server = fork("sleep" if end == "kill" else end)
    assert "GIVEN" in facts(server)
    if end == "kill":
        os.kill(server.pid, signal.SIGKILL)
    eventually(lambda: not server.alive())
    with pytest.raises(ServerError, match=f"ended with code {code}"):
        server.check_alive()


def test_fork_that_was_stopped_before_it_began_never_starts(fork: Fork) -> None:
    given_up = fork("sleep")
    given_up.stop()
    assert facts(fork("sleep"))
    assert not given_up.log.read_text()


def test_fork_outlives_its_parent_and_the_next_gets_another(
    fork: Fork, parent: ForkParent
) -> None:
    first = fork("sleep")
    assert facts(first)
    process = parent._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not process.alive())
    assert facts(fork("sleep"))
    assert first.alive()
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: not first.alive())


@pytest.mark.parametrize(
    "parent_is_gone", [False, True], ids=["with its parent", "orphan"]
)
def test_fork_dies_with_the_process_that_holds_it(
    tmp_path: Path, parent_is_gone: bool
) -> None:
    """As after kill -9, when nothing of the holder runs any more."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        parent, forked = [
            psutil.Process(int(pid)) for pid in holder.stdout.readline().split()
        ]
        if parent_is_gone:
            parent.kill()
            eventually(lambda: process_state(parent) == ENDED)
            assert forked.is_running()
        holder.kill()
        eventually(lambda: process_state(parent) == process_state(forked) == ENDED)


def test_parent_that_cannot_import_says_why(tmp_path: Path) -> None:
    parent = ForkParent("no_such_module", log=tmp_path / "parent.log")
    command = [*PYTHON_MODULE, "no_such_module"]
    server = ServerProcess("echo", command, log=tmp_path / "echo.log", parent=parent)
    with pytest.raises(
        ServerError, match=r"(?s)echo did not start.*No module named 'no_such_module'"
    ):
        server.wait_until(lambda: False, deadline_s=DEADLINE_S)
    server.stop()
    parent.stop()


def test_driver_uses_the_parent_that_its_supervisor_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = EarlyParent(MODULE, log=tmp_path / "parent.log")
    # as in a driver, to which the descriptor is passed
    inherited = os.dup(early.descriptor)
    (name,) = early.environment
    monkeypatch.setenv(name, f"{MODULE}={inherited}")
    fork_parent.hold()
    assert name not in os.environ
    assert not os.get_inheritable(inherited)
    parent = ForkParent(MODULE, log=tmp_path / "parent.log")
    command = [*PYTHON_MODULE, MODULE, "sleep"]
    server = ServerProcess("echo", command, log=tmp_path / "echo.log", parent=parent)
    assert facts(server)["imported here"] is False
    assert psutil.Process(server.pid).ppid() == early._process.pid
    server.stop()
    parent.stop()
    assert early.alive(), "it forks for the next driver"
    early.stop()
    assert not early.alive()
