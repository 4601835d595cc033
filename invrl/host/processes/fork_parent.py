"""A process that has imported a module and forks servers: imports take two thirds of an
engine's start on a CPU, and nearly all of a gateway's.

`ForkParent` is its handle in other processes; this file as a program is the process
itself. The module has two functions: `prepare()` imports what its servers need, and
`main(arguments)` runs one server, as `python -m MODULE ARGUMENTS` would. A server of
another module that needs the same imports can be forked too: its module is imported in
the fork.

Invariants. A forked process dies with the process that asked for it
(`forked_process.py`), not with its parent, which only forks. A parent that died is
started again for the next fork. Requests queue while it imports, so nobody waits for
that.

Not for a module that uses a GPU: CUDA does not survive a fork.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from invrl.host.processes.forked_process import ForkedProcess
from invrl.host.processes.process import ServerProcess, log_tail

_VARIABLE = "INVRL_FORK_PARENT"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Libraries read these when they are imported. A fork has no threads of its parent."""
_MOST_DESCRIPTORS = 200
"""Most descriptors in a message: Linux has a limit of 253."""


@dataclass(frozen=True, slots=True)
class _Start:
    """Arguments for starting a process."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    """Working folder."""
    descriptors: Sequence[int]
    """Numbers under which it inherits open files."""


_held: dict[str, int] = {}
"""Sockets, by module, to processes that the supervisor has started and that already
import it."""


def hold() -> None:
    """Take over the socket that a driver's supervisor has left it, so that no child of
    ours does."""
    value = os.environ.pop(_VARIABLE, "")
    if value:
        module, _, descriptor = value.partition("=")
        _held[module] = int(descriptor)
        os.set_inheritable(_held[module], False)


class EarlyParent:
    """A process that begins to import while its driver is still starting, and forks for
    the drivers after it too."""

    def __init__(self, module: str, *, log: Path) -> None:
        self._process, self._requests = _start(module, log)
        self.descriptor = self._requests.fileno()
        """A driver inherits it, and the `environment`."""
        self.environment = {_VARIABLE: f"{module}={self.descriptor}"}

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.alive()

    def stop(self) -> None:
        """End the process and its forks. Idempotent."""
        self._requests.close()
        if self.alive():
            self._process.stop()


class ForkParent:
    """Handle of the process. Start it from a thread that lives as long as processes are
    forked."""

    def __init__(self, module: str, *, log: Path) -> None:
        """Take over the supervisor's process, or start one. `module`: an import
        path."""
        self._module = module
        self._log = log
        self._lock = threading.Lock()
        """Held while the process is replaced."""
        self._process: ServerProcess | None = None
        """None for the supervisor's process."""
        descriptor = _held.pop(module, None)
        if descriptor is None:
            self._process, self._requests = _start(module, log)
        else:
            self._requests = socket.socket(fileno=descriptor)

    def fork(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: int,
        keep: Sequence[int],
    ) -> ForkedProcess:
        """Fork a process, and return immediately. `name`: for errors. `log`: an open
        file for the output; `keep`: open files that the process inherits under the same
        numbers. It gets copies of all of them."""
        with self._lock:
            if _has_hung_up(self._requests):
                self.stop()
                self._process, self._requests = _start(self._module, self._log)
        start = _Start(module, arguments, environment, os.getcwd(), keep)
        reports, theirs = socket.socketpair()
        lifeline, ours = os.pipe()
        try:
            reports.sendall(json.dumps(asdict(start)).encode() + b"\n")
            with contextlib.suppress(
                BrokenPipeError
            ):  # it ended just now, and so did the process
                socket.send_fds(
                    self._requests, [b"."], [theirs.fileno(), lifeline, log, *keep]
                )
        finally:
            theirs.close()
            os.close(lifeline)
        return ForkedProcess(name, reports, ours, self._last_words)

    def _last_words(self) -> str:
        return f"{_name(self._module)} ended. Last lines of {self._log}:\n{log_tail(self._log)}"

    def stop(self) -> None:
        """End the process and its forks. The supervisor's process stays for the next
        driver. Idempotent."""
        self._requests.close()
        if self._process is not None:
            self._process.stop()


def _start(module: str, log: Path) -> tuple[ServerProcess, socket.socket]:
    """Start the process. Returns it and the socket for requests."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", __name__, module, str(theirs.fileno())]
        process = ServerProcess(
            _name(module), command, log=log, env=_ONE_THREAD, keep=[theirs.fileno()]
        )
    return process, ours


def _name(module: str) -> str:
    return f"the process that forks {module}"


def _has_hung_up(connection: socket.socket) -> bool:
    hang_up = select.poll()
    hang_up.register(connection, select.POLLRDHUP)
    return bool(hang_up.poll(0))


# ----------------------------------------------------------------- the process itself


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    reports: socket.socket


class _Forks:
    """Children of the process, and the socket for requests."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}
        """Children by a descriptor that becomes readable once the child has ended."""

    def next_start(self) -> _Start | None:
        """Fork on request. Returns in each forked process, with its arguments; returns
        None in the parent, once nobody can send requests any more."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._requests:
                    self._collect(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(
                    self._requests, 1, _MOST_DESCRIPTORS
                )
                if not message:
                    return None
                start = self._fork(descriptors)
                if start is not None:
                    return start

    def _fork(self, descriptors: Sequence[int]) -> _Start | None:
        """Fork. Returns the process's arguments in the child, None in the parent."""
        reports = socket.socket(fileno=descriptors[0])
        with reports.makefile("rb") as lines:
            start = _Start(**json.loads(lines.readline()))
        pid = os.fork()
        if pid == 0:
            self._leave()
            reports.detach()
            _take_over(descriptors, start.descriptors)
            return start
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        self._children[process] = _Child(pid, reports)
        self._selector.register(process, selectors.EVENT_READ)
        _tell(reports, pid)
        return None

    def _leave(self) -> None:
        """Close what belongs to the parent and its other children, in a fork."""
        self._selector.close()
        self._requests.close()
        for process, child in self._children.items():
            os.close(process)
            child.reports.close()

    def _collect(self, process: int) -> None:
        child = self._children.pop(process)
        self._selector.unregister(process)
        os.close(process)
        _, status = os.waitpid(child.pid, 0)
        _tell(child.reports, os.waitstatus_to_exitcode(status))
        child.reports.close()


def _tell(reports: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        reports.sendall(b"%d\n" % number)


def _take_over(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Make the log a fork's output, and give the files after it their `numbers`. The
    copy of the reports' socket stays open, so that the parent's death alone does not
    end the reports."""
    os.setpgid(0, 0)
    moved = [
        fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers, default=0) + 100)
        for file in descriptors
    ]
    for file in descriptors:
        os.close(file)
    _, lifeline, log, *inherited = moved
    _die_with_writer(lifeline)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    os.close(log)
    for file, number in zip(inherited, numbers, strict=True):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            raise RuntimeError(
                f"descriptor {number} is taken in the process that forks"
            )
        os.dup2(file, number)
        os.close(file)


def _die_with_writer(lifeline: int) -> None:
    """Let the kernel kill this process when the last writing end of the pipe closes."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(
        lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC
    )
    hang_up = select.poll()
    hang_up.register(lifeline, 0)
    if hang_up.poll(0):  # it closed before that
        os._exit(1)


def _set_environment(start: _Start, prepared: Mapping[str, str]) -> None:
    """Set a fork's environment. `prepared`: variables that the parent's module has set
    for its servers."""
    import setproctitle

    command = [sys.executable, "-m", start.module, *start.arguments]
    # before the environment changes, whose memory it uses
    setproctitle.setproctitle(" ".join(command))
    os.environ.clear()
    os.environ.update({**start.environment, **prepared})
    os.chdir(start.folder)
    tempfile.tempdir = None  # of the parent's environment


def main(module: str, descriptor: int) -> None:
    """Import the module, and serve the other end of the socket `descriptor`."""
    inherited = dict(os.environ)
    program: Any = importlib.import_module(module)
    program.prepare()
    prepared = {
        name: value
        for name, value in os.environ.items()
        if inherited.get(name) != value
    }
    start = _Forks(socket.socket(fileno=descriptor)).next_start()
    if start is not None:
        _set_environment(start, prepared)
        program = importlib.import_module(start.module)
        program.main(start.arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
