"""A process that a `ForkParent` has forked for us, which is not our child: the part of
`subprocess.Popen` that a server uses.

Invariant: it dies with its `ForkedProcess`, by a pipe of which only this process has
the writing end. The kernel kills the reader when that end closes, whatever became of
the parent."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from subprocess import TimeoutExpired

from invrl.errors import DeadlineError, ServerError

_FORK_DEADLINE_S = 300.0
"""For the imports of the parent on a busy machine, and the fork."""
_POLL_INTERVAL_S = 0.05


class ForkedProcess:
    """It may be made before the process is forked: nothing waits for that but `pid`."""

    def __init__(
        self,
        name: str,
        reports: socket.socket,
        lifeline: int,
        parents_last_words: Callable[[], str],
    ) -> None:
        """`reports`: where the parent sends a line with the pid, and one with the exit
        code. `lifeline`: the writing end of the pipe."""
        self._name = name
        reports.setblocking(False)
        self._reports = reports
        self._lifeline = lifeline
        self._parents_last_words = parents_last_words
        self._unread = b""
        self._pid: int | None = None
        self._lock = threading.Lock()
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits for the fork. Raises ServerError if the parent ended first,
        DeadlineError if that takes `_FORK_DEADLINE_S`."""
        deadline = time.monotonic() + _FORK_DEADLINE_S
        while self.poll() is None and self._pid is None:
            if time.monotonic() > deadline:
                raise DeadlineError(f"{self._name} to be forked", _FORK_DEADLINE_S)
            time.sleep(_POLL_INTERVAL_S)
        if self._pid is None:
            raise self.not_forked()
        return self._pid

    def is_forked(self) -> bool:
        self.poll()
        return self._pid is not None

    def not_forked(self) -> ServerError:
        """The error of a process whose parent ended first."""
        return ServerError(f"{self._name} did not start. {self._parents_last_words()}")

    def poll(self) -> int | None:
        """The exit code, as Popen gives it; None while the process lives or is not
        forked yet. A process that outlived its parent ends with the code of SIGKILL:
        nobody knows another one."""
        with self._lock:
            if self.returncode is None:
                self._read()
            return self.returncode

    def _read(self) -> None:
        at_end = True  # the parent has the other end, and so has the process
        try:
            while chunk := self._reports.recv(64):
                self._unread += chunk
        except BlockingIOError:
            at_end = False
        except OSError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            if self._pid is None:
                self._pid = int(line)
            else:
                self.returncode = int(line)
        if at_end and self.returncode is None:
            self.returncode = -signal.SIGKILL

    def wait(self, timeout: float) -> int:
        """Raises TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutExpired(self._name, timeout)
            time.sleep(_POLL_INTERVAL_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def close(self) -> None:
        """Kills the process if it lives; one that is not forked never starts.
        Idempotent."""
        with self._lock:
            if self.returncode is None:
                self.returncode = -signal.SIGKILL
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
            self._reports.close()

    def __del__(self) -> None:
        self.close()
