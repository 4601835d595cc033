"""OS processes of ours: how any server is started, watched and ended.

Invariant: what we start, we end. A child gets SIGKILL from the kernel when the thread that started
it dies (PR_SET_PDEATHSIG), so start servers from a thread that lives as long as they should. Logs
go to files, never pipes: a grandchild that outlives its parent would hold a pipe open."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import psutil

from invrl.errors import DeadlineError, ServerError

_PR_SET_PDEATHSIG = 1
_KILLED_WITHIN_S = 30.0
"""After SIGKILL; gigabytes are given back meanwhile."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """In a fresh child: ask the kernel to kill this process when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A port nobody listens on now, below those that Linux gives away by itself (from 32768): an engine takes
    a minute to come to its own."""
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def still_running(processes: Collection[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those that have not ended after `within_s`. A zombie has: not every init collects them."""
    end = time.monotonic() + within_s
    while (left := [one for one in processes if _runs(one)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class RestartLimit:
    """How often what died is started again: `most` times in any minute. More means that it cannot live."""

    def __init__(self, most: int) -> None:
        self._at: deque[float] = deque(maxlen=most)

    def allows(self) -> bool:
        """Counts one more restart; False where it is one too many."""
        now = time.monotonic()
        full = len(self._at) == self._at.maxlen and now - self._at[0] < 60.0
        self._at.append(now)
        return not full


class ServerProcess:
    """A server in its own process, with its log file. `keep`: open files of ours that it inherits."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **(env or {})}
        with log.open("ab") as out:
            self._process = Popen(
                command,
                stdin=DEVNULL,
                stdout=out,
                stderr=STDOUT,
                env=variables,
                pass_fds=keep,
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
            ended = f"{self.name} ended with code {self._process.returncode}"
            raise ServerError(f"{ended}. Last lines of {self.log}:\n{self.log_tail()}")

    def wait_ready(self, probe: Callable[[], bool], *, deadline_s: float) -> float:
        """Seconds until `probe` says True. Raises ServerError if the process dies first,
        DeadlineError after `deadline_s`."""
        start = time.monotonic()
        while True:
            self.check_alive()
            if probe():
                return time.monotonic() - start
            if time.monotonic() - start > deadline_s:
                waited_for = f"{self.name} to be ready; last lines of {self.log}:\n{self.log_tail()}"
                raise DeadlineError(waited_for, deadline_s)
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
        for process in (left := still_running(family, within_s=grace_s)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        still_running(left, within_s=_KILLED_WITHIN_S)
        self._process.wait(timeout=_KILLED_WITHIN_S)


class LocalServer:
    """A server on a free port of this machine: made first, started (`_launch`) later, ended once."""

    def __init__(self, name: str, *, run_folder: Path) -> None:
        self.name, self.port = name, 0
        self.api_key = secrets.token_hex(24)  # becomes an argument: must not begin with "-"
        self._log = run_folder / "logs" / f"{name}.log"
        self._process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    def _launch(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = ServerProcess(self.name, command, log=self._log, env=env)

    def alive(self) -> bool:
        return self._process is not None and self._process.alive()

    def check_alive(self) -> None:
        """Raises ServerError if it was started and has ended."""
        if self._process is not None:
            self._process.check_alive()

    def stop(self, *, grace_s: float = 5.0) -> None:
        if self._process is not None:
            self._process.stop(grace_s=grace_s)
