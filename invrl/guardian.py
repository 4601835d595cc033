"""The process that outlives a killed driver just long enough to end what the driver started.

Servers that we start die with us through PR_SET_PDEATHSIG. Ray's own processes do not all: after kill -9 of a
driver its raylet goes at once, its agents linger for up to a minute. The guardian remembers the driver's
descendants while it lives and kills whichever are left once it is gone. A rollout worker has a guardian too:
processes that user code put into a session of their own end with their worker.

A descendant is known by having been seen below the watched process (start time included), or by a mark: the
watched process sets it in its environment, and what it starts inherits it, also a daemon that has left the
tree at once. Invariant: nothing else is ever touched. A process has one guardian, which ends with it."""

import contextlib
import functools
import os
import secrets
import signal
import subprocess
import sys

import psutil

from invrl.process import still_running

_LOOK_EVERY_S = 2.0
_GRACE_S = 3.0
_MARK = "INVRL_STARTED_BY"


def start_guardian() -> None:
    """Watch this process from a session of its own, so that Ctrl-C and a killed group pass it by."""
    _start(os.getpid())


@functools.cache
def _start(pid: int) -> None:
    mark = secrets.token_hex(16)
    os.environ[_MARK] = mark
    subprocess.Popen(
        [sys.executable, "-m", "invrl.guardian", str(pid), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


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
    """Processes of this user that were started with the mark in their environment."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            with open(f"/proc/{process.pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if wanted in variables and process.pid != os.getpid():
                found.append(process)
    return found


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
