"""A server that does not end is named, and does not keep its caller from ending the others."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from invrl import process
from invrl.errors import ServerError
from invrl.process import ENDED, STOPPED, ServerProcess, state_of

WAITS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(3600)
"""


def test_a_process_that_sigkill_does_not_end_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that waits for a disk. It used to be a TimeoutExpired, which nobody caught."""
    log = tmp_path / "log"
    server = ServerProcess("engine-3", [sys.executable, "-c", WAITS], log=log)
    server.grace_s = 0.1
    server.wait_until(lambda: b"up" in log.read_bytes(), deadline_s=300.0)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_KILLED_WITHIN_S", 0.1)
        patch.setattr(psutil.Process, "kill", lambda self: None)
        with pytest.raises(ServerError, match=rf"engine-3 does not end: SIGKILL was sent .* to {server.pid}"):
            server.stop()
    assert server.alive()
    server.stop()
    assert not server.alive()


def test_the_state_of_a_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = ServerProcess("server", [sys.executable, "-c", WAITS], log=log)
    server.grace_s = 0.1
    server.wait_until(lambda: b"up" in log.read_bytes(), deadline_s=300.0)
    found = psutil.Process(server.pid)
    assert state_of(found) not in (ENDED, STOPPED)
    found.suspend()
    while state_of(found) != STOPPED:
        pass
    server.stop()  # a stopped one too
    assert state_of(found) == ENDED
