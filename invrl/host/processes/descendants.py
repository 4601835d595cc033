"""The processes below this one: ending with it, and finding and ending those that are
left.

The only place that calls `prctl`. Linux only, and standard library only:
`launch/run_contained.py` imports this file before anything is installed.
`invrl/host/__init__.py` lists the deaths that each mechanism covers.
"""

import contextlib
import ctypes
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_POLL_INTERVAL_S = 0.05


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when the thread that started it
    dies.

    For the `preexec_fn` of a child. A parent that died before this call is not noticed.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, in whatever session it is.

    This process must then reap them (`collect_ended_children`).
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


@dataclass(frozen=True, slots=True)
class Descendant:
    """A living process below this one. The start time tells it from a later process
    with the same pid."""

    pid: int
    start_ticks: int

    def name(self) -> str:
        try:
            return (
                Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8").rstrip("\n")
            )
        except OSError:
            return "?"

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Do nothing if the process has ended."""
        status = _read_status(self.pid)
        if status is None or status.start_ticks != self.start_ticks:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(frozen=True, slots=True)
class _Status:
    """Fields of /proc/PID/stat."""

    state: str
    parent: int
    start_ticks: int


def _read_status(pid: int) -> _Status | None:
    """Return the status; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name, in parentheses, may hold spaces. The first field after it is number 3 in
    # proc(5).
    fields = text.rpartition(")")[2].split()
    return _Status(state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def descendants() -> list[Descendant]:
    """Return the processes below this one, parents before their children. Zombies are
    left out."""
    children: dict[int, list[Descendant]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        status = _read_status(pid)
        if status is not None and status.state != "Z":
            child = Descendant(pid=pid, start_ticks=status.start_ticks)
            children.setdefault(status.parent, []).append(child)
    below: list[Descendant] = []
    unvisited = [os.getpid()]
    while unvisited:
        next_children = children.get(unvisited.pop(), [])
        below += next_children
        unvisited += [child.pid for child in next_children]
    return below


def end_descendants(
    *,
    terminate: bool,
    grace_s: float,
    kill_within_s: float = math.inf,
    except_pid: int | None = None,
) -> list[Descendant]:
    """End every process below this one, except one; call `adopt_orphans` first, or some
    are not found.

    The processes have `grace_s` to end by themselves, after SIGTERM if `terminate`.
    Then they get SIGKILL. A killed process's children become ours, so the search
    repeats until none is left. Returns the processes that SIGKILL has not ended within
    `kill_within_s`.
    """
    kill_from = time.monotonic() + grace_s
    give_up_at = kill_from + kill_within_s
    terminated: set[Descendant] = set()
    while True:
        collect_ended_children()
        remaining = [below for below in descendants() if below.pid != except_pid]
        now = time.monotonic()
        if not remaining or now > give_up_at:
            return remaining
        for process in remaining:
            if now > kill_from:
                process.send(signal.SIGKILL)
            elif terminate and process not in terminated:
                terminated.add(process)
                process.send(signal.SIGTERM)
        time.sleep(_POLL_INTERVAL_S)


def collect_ended_children(*, except_pid: int | None = None) -> None:
    """Remove ended children, including adopted ones, from the process table.

    `except_pid` stays: its exit code is for the `Popen` that waits for it. An ended
    child that comes after it is collected by a later call.
    """
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid == except_pid:
                return
            os.waitpid(ended.si_pid, 0)
