"""A server that does not end is named, and does not keep its caller from ending the
others."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from invrl.engines.launch import engine_server
from invrl.errors import ServerError
from invrl.host.processes import process
from invrl.host.processes.process import ENDED, STOPPED, ServerProcess, process_state

WAITS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(3600)
"""


def test_process_that_survives_sigkill_is_an_error_that_names_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that waits for a disk. It used to be a TimeoutExpired, which nobody
    caught."""
    log = tmp_path / "log"
    server = ServerProcess("engine-3", [sys.executable, "-c", WAITS], log=log)
    server.grace_s = 0.1
    server.wait_until(lambda: b"up" in log.read_bytes(), deadline_s=300.0)
    with monkeypatch.context() as patch:
        patch.setattr(process, "_KILL_DEADLINE_S", 0.1)
        patch.setattr(psutil.Process, "kill", lambda self: None)
        with pytest.raises(
            ServerError,
            match=rf"engine-3 does not end: SIGKILL was sent .* to {server.pid}",
        ):
            server.stop()
    assert server.alive()
    server.stop()
    assert not server.alive()


SCHEDULER = """
import os, time
import setproctitle
if os.fork() == 0:
    setproctitle.setproctitle("sglang::scheduler")
    if os.fork() == 0:  # on its way to another program
        print("up", flush=True)
time.sleep(3600)
"""


def test_program_started_by_a_scheduler_is_not_an_engine_process(
    tmp_path: Path,
) -> None:
    """On a busy machine the start ended with "sglang::scheduler ended" when such a
    program did."""
    log = tmp_path / "log"
    server = ServerProcess("engine-0", [sys.executable, "-c", SCHEDULER], log=log)
    server.grace_s = 0.1
    try:
        server.wait_until(lambda: b"up" in log.read_bytes(), deadline_s=300.0)
        root, scheduler, started = process.process_tree(server.pid)
        assert scheduler.name() == started.name() == "sglang::scheduler"
        assert started.ppid() == scheduler.pid
        assert engine_server.engine_processes(server.pid) == [root, scheduler]
    finally:
        server.stop()


def test_process_state_is_running_stopped_or_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = ServerProcess("server", [sys.executable, "-c", WAITS], log=log)
    server.grace_s = 0.1
    server.wait_until(lambda: b"up" in log.read_bytes(), deadline_s=300.0)
    ps_process = psutil.Process(server.pid)
    assert process_state(ps_process) not in (ENDED, STOPPED)
    ps_process.suspend()
    while process_state(ps_process) != STOPPED:
        pass
    server.stop()  # a stopped one too
    assert process_state(ps_process) == ENDED


class Answering(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As a driver with a thousand rollouts has them: the next one is above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < 1024:
        held.append(os.dup(held[0]))
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
def test_first_token_request_works_for_any_socket_number() -> None:
    with HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        http = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        status = engine_server._post(
            http, "/generate", "key", b"{}", meanwhile=lambda: None
        )
        http.close()
    assert status == 200
