"""A process that outlives a killed driver or rollout worker just long enough to end
that one's descendants.

Servers that we start die with us through PR_SET_PDEATHSIG. Not all of Ray's own
processes do: after kill -9 of a driver its raylet ends immediately, its agents linger
for up to a minute. The guardian records the watched process's descendants while it
lives, and kills those that are left once it is gone. A rollout worker has a guardian
too, so processes that user code put into their own session end with their worker.
Finally the guardian removes the temporary folders whose owners are gone
(`temporary_folder.py`).

A descendant is recognised in one of two ways:

- It has been seen below the watched process. Its start time tells it from a later
  process with the same pid.
- It bears the mark, as a daemon does that has left the tree immediately. The mark is in
  the environment, which every started program inherits. It is also the name of a page
  of memory, which every fork inherits that starts no program.

Not reached: a daemon that left the tree between two scans and was started with a new
environment. The supervisor ends it with the run's incarnation.
(`invrl/host/__init__.py` says why the watched process does not adopt orphans itself.)

Invariant: no other process is ever touched. A process has one guardian, which ends with
it.
"""

import contextlib
import functools
import mmap
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil

from invrl.host.files.temporary_folder import remove_abandoned
from invrl.host.processes.process import end_processes

_LOOK_INTERVAL_S = 2.0
_GRACE_S = 3.0
_MARK_VARIABLE = "INVRL_STARTED_BY"
_PAGES: list[mmap.mmap] = []
"""Pages of the marks, mapped as long as this process lives."""

Family = dict[tuple[int, float], psutil.Process]
"""Processes by pid and start time."""


def start_guardian() -> None:
    """Watch this process from a separate session, which Ctrl-C and a killed process
    group do not reach."""
    _start(os.getpid())


@functools.cache
def _start(pid: int) -> None:
    mark = secrets.token_hex(16)
    os.environ[_MARK_VARIABLE] = mark
    _PAGES.append(_named_page(_page_name(mark)))
    subprocess.Popen(
        [sys.executable, "-m", "invrl.host.processes.guardian", str(pid), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _page_name(mark: str) -> str:
    return f"{_MARK_VARIABLE}-{mark}"


def _named_page(name: str) -> mmap.mmap:
    """Map a page whose name is in /proc/PID/maps of this process and of every process
    that it forks."""
    descriptor = os.memfd_create(name)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def guard(pid: int, mark: str) -> None:
    """Wait until process `pid` is gone, then end everything below it."""
    family: Family = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        _track_descendants(psutil.Process(pid), family)
    # Descendants that appeared since the last scan: below the known ones, and below the
    # marked ones.
    for process in [*family.values(), *_marked(mark)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            _record(family, [process, *process.children(recursive=True)])
    # Their ends are awaited: a fork of the owner holds the lock of its temporary folder.
    end_processes(family.values(), grace_s=_GRACE_S, kill_within_s=_GRACE_S)


def _track_descendants(watched: psutil.Process, family: Family) -> None:
    """Keep `family` up to date while the watched process lives. Raises
    psutil.NoSuchProcess."""
    while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
        _record(family, watched.children(recursive=True))
        for key, process in list(family.items()):
            if not process.is_running():
                del family[key]
        with contextlib.suppress(psutil.TimeoutExpired):
            watched.wait(timeout=_LOOK_INTERVAL_S)


def _record(family: Family, processes: list[psutil.Process]) -> None:
    """Add the processes to the family, but not the guardian itself."""
    for process in processes:
        if process.pid != os.getpid():
            family.setdefault((process.pid, process.create_time()), process)


def _marked(mark: str) -> list[psutil.Process]:
    """Return this user's processes that were started with the mark in their
    environment, or forked with its page."""
    variable = f"{_MARK_VARIABLE}={mark}".encode()
    page_name = _page_name(mark).encode()
    marked: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if variable in variables or page_name in (folder / "maps").read_bytes():
                marked.append(process)
    return marked


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
    remove_abandoned()
