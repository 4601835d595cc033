"""OS processes that we start: one class that starts, watches and ends any server.

Invariant: what we start, we end. A child gets SIGKILL from the kernel when the thread that started
it dies (PR_SET_PDEATHSIG), so start servers from a thread that lives as long as they should. Logs
go to files, never pipes: a grandchild that outlives its parent would hold a pipe open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from invrl.errors import DeadlineError, ServerError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a fresh child: ask the kernel to kill this process when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server in its own process, with its log file."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the log: what a person reads first when a server fails."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 64_000))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def check_alive(self) -> None:
        """Raises ServerError if the process has ended."""
        if not self.alive():
            raise ServerError(
                f"{self.name} ended with code {self._process.returncode}. "
                f"Last lines of {self.log}:\n{self.log_tail()}"
            )

    def wait_ready(self, probe: Callable[[], bool], *, deadline_s: float) -> float:
        """Seconds until `probe` says True. Raises ServerError if the process dies first,
        DeadlineError after `deadline_s`."""
        start = time.monotonic()
        while True:
            self.check_alive()
            if probe():
                return time.monotonic() - start
            if time.monotonic() - start > deadline_s:
                raise DeadlineError(
                    f"{self.name} to be ready; last lines of {self.log}:\n{self.log_tail()}", deadline_s
                )
            time.sleep(0.1)

    def stop(self, *, grace_s: float = 5.0) -> None:
        """End the process and everything below it: politely, then not."""
        try:
            root = psutil.Process(self.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        if self.alive():
            self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=grace_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=grace_s)
        self._process.wait(timeout=grace_s)
