"""The process that outlives a killed driver just long enough to end what the driver started.

Servers that we start die with us through PR_SET_PDEATHSIG. Ray's own processes do not all: after kill -9 of a
driver its raylet goes at once, its agents linger for up to a minute. The guardian remembers the driver's
descendants while it lives and kills whichever are left once it is gone. A rollout worker has a guardian too:
processes that user code put into a session of their own end with their worker.

A descendant is known by having been seen below the watched process (start time included), or by a mark, which
a daemon that has left the tree at once has too. The mark is in the environment, which every program that is
started inherits. It is also the name of a page of memory, which every fork inherits that starts no program.
(The watched process does not adopt orphans, as PR_SET_CHILD_SUBREAPER would have it: it would have to collect
them when they end, beside user code that waits for children of its own.)
Not reached: a daemon that has left the tree between two looks and was started with an environment made anew.
It ends with the run's incarnation, by the supervisor.

Invariant: nothing else is ever touched. A process has one guardian, which ends with it."""

import contextlib
import functools
import mmap
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from invrl.host.process import still_running

_LOOK_EVERY_S = 2.0
_GRACE_S = 3.0
_MARK = "INVRL_STARTED_BY"
_PAGES: list[mmap.mmap] = []
"""Of the guardians' marks. They stay mapped for as long as this process lives."""


def start_guardian() -> None:
    """Watch this process from a session of its own, so that Ctrl-C and a killed group pass it by."""
    _start(os.getpid())


@functools.cache
def _start(pid: int) -> None:
    mark = secrets.token_hex(16)
    os.environ[_MARK] = mark
    _PAGES.append(_page_called(_name_of_page(mark)))
    subprocess.Popen(
        [sys.executable, "-m", "invrl.host.guardian", str(pid), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _name_of_page(mark: str) -> str:
    return f"{_MARK}-{mark}"


def _page_called(name: str) -> mmap.mmap:
    """Its name is in /proc/PID/maps of this process and of all that it forks."""
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def guard(pid: int, mark: str) -> None:
    """Returns when `pid` is gone and everything below it too."""
    me = psutil.Process()
    family: dict[tuple[int, float], psutil.Process] = {}
    try:
        watched = psutil.Process(pid)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            for child in watched.children(recursive=True):
                if child != me:
                    family.setdefault((child.pid, child.create_time()), child)
            family = {key: child for key, child in family.items() if child.is_running()}
            with contextlib.suppress(psutil.TimeoutExpired):
                watched.wait(timeout=_LOOK_EVERY_S)
    except psutil.NoSuchProcess:
        pass
    # Late grandchildren of the known ones, then the known ones themselves.
    for process in [*family.values(), *_marked(mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in (process, *process.children(recursive=True)):
                if member != me:
                    family.setdefault((member.pid, member.create_time()), member)
    for process in still_running(family.values(), within_s=_GRACE_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def _marked(mark: str) -> list[psutil.Process]:
    """This user's processes that were started with the mark in their environment, or forked with its page."""
    variable = f"{_MARK}={mark}".encode()
    page = _name_of_page(mark).encode()
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if variable in variables or page in Path(f"/proc/{process.pid}/maps").read_bytes():
                found.append(process)
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
