"""A process that a `ForkParent` has forked, which is not our child: the part of
`subprocess.Popen` that a server uses.

Invariant: it dies with its `ForkedProcess`, by a pipe whose writing end only this
process has. The kernel kills the reader when that end closes, even if the parent is
dead.
"""

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
"""Seconds for the parent's imports on a busy machine, and the fork."""
_POLL_INTERVAL_S = 0.05


class ForkedProcess:
    """A forked process. It may be made before the fork: only `pid` waits for that."""

    def __init__(
        self,
        name: str,
        reports: socket.socket,
        lifeline: int,
        parents_last_words: Callable[[], str],
    ) -> None:
        """`reports`: socket on which the parent sends a line with the pid, and one with
        the exit code. `lifeline`: the writing end of the pipe."""
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
        """Wait for the fork, and return the pid. Raises ServerError if the parent ended
        first, DeadlineError after `_FORK_DEADLINE_S`."""
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
        """Return the error of a process whose parent ended first."""
        return ServerError(f"{self._name} did not start. {self._parents_last_words()}")

    def poll(self) -> int | None:
        """Return the exit code as Popen does; None while the process lives or is not
        forked yet. A process that outlived its parent ends with the code of SIGKILL:
        the real one is unknown."""
        with self._lock:
            if self.returncode is None:
                self._read()
            return self.returncode

    def _read(self) -> None:
        at_end = True  # both the parent and the process have the other end
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
        """Wait for the exit code. Raises TimeoutExpired."""
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
        """Kill the process if it lives; one that is not forked never starts.
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
