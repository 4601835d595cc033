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
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

import psutil

from invrl.errors import DeadlineError, ServerError
from invrl.host.private_file import open_private

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


_LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A port nobody listens on now and no server of ours is to have: for who binds it at once. A server that
    takes its time is given a `ReservedPort`."""
    with contextlib.closing(ReservedPort()) as port:
        return port.number


class ReservedPort:
    """A port of loopback that stays ours until a server of ours listens on it, and while it restarts.

    It is held by a bound socket that never listens. Linux lets a second socket bind beside it only with
    SO_REUSEADDR, which uvicorn, tokio and libuv set. Whoever looks for a free port without that option, this
    class included, finds it in use. The number is below those that Linux gives away by itself (from 32768):
    an engine takes a minute to come to its own."""

    def __init__(self) -> None:
        while True:
            self.number = 20_000 + secrets.randbelow(12_768)
            self._socket = socket.socket()
            try:
                self._socket.bind((_LOOPBACK, self.number))  # refused where anybody is bound
            except OSError:
                self._socket.close()
                continue
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return

    def is_listened_on(self) -> bool:
        """Asked when our server could not: has somebody else taken it all the same?"""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_LOOPBACK, self.number))
            except OSError:
                return True
        return False

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def still_running(processes: Collection[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those that have not ended after `within_s`. A zombie has: not every init collects them."""
    end = time.monotonic() + within_s
    while (left := [one for one in processes if _runs(one)]) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def family_of(pid: int) -> list[psutil.Process]:
    """Process `pid` and everything below it; empty once it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


ENDED = "ended"
STOPPED = psutil.STATUS_STOPPED


def state_of(process: psutil.Process) -> str:
    """`ENDED` (a zombie too), `STOPPED` (by SIGSTOP), or another of the kernel's words."""
    try:
        state = process.status() if process.is_running() else ENDED
    except psutil.NoSuchProcess:
        return ENDED
    return ENDED if state == psutil.STATUS_ZOMBIE else state


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
        with open_private(log, append=True) as out:
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
        """End the process and everything below it: politely, then not. Idempotent. Raises ServerError naming
        what the kernel did not end within `_KILLED_WITHIN_S` of SIGKILL."""
        family = family_of(self.pid)
        if self.alive():
            self._process.terminate()
        left = still_running(family, within_s=self.grace_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        left = still_running(left, within_s=_KILLED_WITHIN_S)
        with contextlib.suppress(TimeoutExpired):  # then it is among those left
            self._process.wait(timeout=_KILLED_WITHIN_S)
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            reason = f"{self.name} does not end: SIGKILL was sent {_KILLED_WITHIN_S:g} s ago to {pids}"
            raise ServerError(f"{reason}. A process like this waits for the kernel (a disk, a device).")
