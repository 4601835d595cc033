"""OS processes of ours: how any server is started, watched and ended.

Invariant: what we start, we end. A child gets SIGKILL from the kernel when the thread that started
it dies (PR_SET_PDEATHSIG), so start servers from a thread that lives as long as they should. Logs
go to files, never pipes: a grandchild that outlives its parent would hold a pipe open."""

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


def random_key() -> str:
    """Of a private server."""
    return secrets.token_hex(24)  # becomes an argument: no space, no "-" at its beginning


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
    """A server in its own process, which starts as this is made, with its log file. `keep`: open files of
    ours that it inherits."""

    grace_s = 5.0
    """Between TERM and KILL."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, **(env or {})}
        with log.open("ab") as out:
            self._process = Popen(
                command, stdin=DEVNULL, stdout=out, stderr=STDOUT,
                env=variables, pass_fds=keep, preexec_fn=die_with_parent, process_group=0,
            )  # fmt: skip

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

    def wait_until(self, probe: Callable[[], bool], what: str = "be ready", *, deadline_s: float) -> None:
        """Until `probe` says True. Raises ServerError if the process dies first, DeadlineError after
        `deadline_s`, which says that the server was to do `what`."""
        ends = time.monotonic() + deadline_s
        while True:
            self.check_alive()
            if probe():
                return
            if time.monotonic() > ends:
                waited_for = f"{self.name} to {what}; last lines of {self.log}:\n{self.log_tail()}"
                raise DeadlineError(waited_for, deadline_s)
            time.sleep(0.1)

    def stop(self) -> None:
        """End the process and everything below it: politely, then not. Idempotent."""
        try:
            root = psutil.Process(self.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        if self.alive():
            self._process.terminate()
        for process in (left := still_running(family, within_s=self.grace_s)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        still_running(left, within_s=_KILLED_WITHIN_S)
        self._process.wait(timeout=_KILLED_WITHIN_S)
