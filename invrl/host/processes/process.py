"""A server in its own process: starting, watching and ending it.

Invariant: what we start, we end. The kernel kills a server when the thread that started
it dies (`descendants.die_with_parent`), so start servers from a thread that lives as
long as they should. Logs go to files, never to pipes: a grandchild that outlives its
parent would hold a pipe open.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import TYPE_CHECKING

import psutil

from invrl.errors import DeadlineError, ServerError
from invrl.host.files.private_file import open_private
from invrl.host.output.wait_lines import overload
from invrl.host.processes.descendants import die_with_parent
from invrl.host.processes.forked_process import ForkedProcess

if TYPE_CHECKING:
    from invrl.host.processes.fork_parent import ForkParent

PYTHON_MODULE = (sys.executable, "-m")
"""Beginning of the command of a server that a parent may fork; its module and its
arguments follow."""
_KILL_DEADLINE_S = 30.0
"""Seconds for a process to be gone after SIGKILL. Releasing gigabytes of memory takes a
while."""
_LOG_TAIL_BYTES = 64_000


def random_key() -> str:
    """Return a key for a private server. It becomes a command-line argument: no spaces,
    no "-" at its beginning."""
    return secrets.token_hex(24)


def still_running(
    processes: Collection[psutil.Process], *, within_s: float
) -> list[psutil.Process]:
    """Return the processes that have not ended after `within_s`. Returns earlier if all
    have ended.

    A zombie has ended: not every init process collects them.
    """
    deadline = time.monotonic() + within_s
    while True:
        remaining = [
            process for process in processes if process_state(process) != ENDED
        ]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.02)


def end_processes(
    processes: Collection[psutil.Process], *, grace_s: float, kill_within_s: float
) -> list[psutil.Process]:
    """Wait `grace_s` for the processes to end, then kill those that are left. Returns
    those that SIGKILL has not ended within `kill_within_s`."""
    remaining = still_running(processes, within_s=grace_s)
    for process in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return still_running(remaining, within_s=kill_within_s)


def process_tree(pid: int) -> list[psutil.Process]:
    """Return process `pid` and everything below it; empty once it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


ENDED = "ended"
STOPPED = psutil.STATUS_STOPPED


def process_state(process: psutil.Process) -> str:
    """Return `ENDED` (also for a zombie), `STOPPED` (by SIGSTOP), or another of the
    kernel's states."""
    try:
        if not process.is_running():
            return ENDED
        state = process.status()
    except psutil.NoSuchProcess:
        return ENDED
    if state == psutil.STATUS_ZOMBIE:
        return ENDED
    return state


def log_tail(path: Path, lines: int = 25) -> str:
    """Return the last lines of a log."""
    with path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])


class RestartLimit:
    """Limit of restarts: at most `most` in any `period_s` seconds."""

    def __init__(
        self,
        most: int,
        *,
        period_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._times: deque[float] = deque(maxlen=most)
        self._clock = clock
        self._period_s = period_s

    def is_reached(self) -> bool:
        """Whether there were `most` restarts in the last period."""
        if len(self._times) != self._times.maxlen:
            return False
        return not self._times or self._clock() - self._times[0] < self._period_s

    def allows(self) -> bool:
        """Count one more restart. Returns False if the limit was already reached."""
        allowed = not self.is_reached()
        self._times.append(self._clock())
        return allowed


class ServerProcess:
    """A server with its log file. Its process starts when the object is made.

    `keep` holds open file descriptors of ours that the server inherits. A `parent`
    (`fork_parent.py`), which has imported what the module needs that `command` runs,
    forks the process.
    """

    grace_s = 5.0
    """Seconds between SIGTERM and SIGKILL."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        keep: Sequence[int] = (),
        parent: ForkParent | None = None,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = dict(os.environ)
        if env is not None:
            variables.update(env)
        with open_private(log, append=True) as log_file:
            self._process: Popen[bytes] | ForkedProcess
            if parent is None:
                self._process = Popen(
                    command,
                    stdin=DEVNULL,
                    stdout=log_file,
                    stderr=STDOUT,
                    env=variables,
                    pass_fds=keep,
                    preexec_fn=die_with_parent,
                    process_group=0,
                )
            else:
                module, *arguments = command[len(PYTHON_MODULE) :]
                self._process = parent.fork(
                    name, module, arguments, variables, log_file.fileno(), keep
                )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code as Popen's; None while the process lives."""
        return self._process.poll()

    def alive(self) -> bool:
        return self._process.poll() is None

    def log_tail(self, lines: int = 25) -> str:
        """Return the last lines of the log, for an error about the server."""
        return log_tail(self.log, lines)

    def check_alive(self) -> None:
        """Raise ServerError if the process has ended."""
        if not self.alive():
            if (
                isinstance(self._process, ForkedProcess)
                and not self._process.is_forked()
            ):
                raise self._process.not_forked()
            raise ServerError(
                f"{self.name} ended with code {self._process.returncode}. "
                f"Last lines of {self.log}:\n{self.log_tail()}"
            )

    def wait_until(
        self, probe: Callable[[], bool], what: str = "be ready", *, deadline_s: float
    ) -> None:
        """Wait until `probe` returns True.

        Raises ServerError if the process ends first, DeadlineError after `deadline_s`.
        `what` completes the error "NAME to ...".
        """
        give_up_at = time.monotonic() + deadline_s
        while True:
            self.check_alive()
            if probe():
                return
            if time.monotonic() > give_up_at:
                waited_for = f"{self.name} to {what}{overload()}; last lines of {self.log}:\n{self.log_tail()}"
                raise DeadlineError(waited_for, deadline_s)
            time.sleep(0.1)

    def stop(self) -> None:
        """End the process and everything below it: SIGTERM, then SIGKILL after
        `grace_s`. Idempotent.

        Raises ServerError with the processes that have not ended `_KILL_DEADLINE_S`
        after SIGKILL.
        """
        if isinstance(self._process, ForkedProcess) and not self._process.is_forked():
            self._process.close()
            return
        family = process_tree(self.pid)
        if self.alive():
            self._process.terminate()
        remaining = end_processes(
            family, grace_s=self.grace_s, kill_within_s=_KILL_DEADLINE_S
        )
        with contextlib.suppress(TimeoutExpired):  # then it is among the remaining ones
            self._process.wait(timeout=_KILL_DEADLINE_S)
        if remaining:
            pids = ", ".join(str(process.pid) for process in remaining)
            raise ServerError(
                f"{self.name} does not end: SIGKILL was sent {_KILL_DEADLINE_S:g} s ago to {pids}. "
                "A process like this waits for the kernel (a disk, a device)."
            )
