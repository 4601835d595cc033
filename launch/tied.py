"""Runs one command and ends with it whatever it started: `python launch/tied.py COMMAND ...`.

Every process below the command is found even if it was orphaned (this process is the reaper of its
descendants) and is ended when the command ends, for whatever reason: success, failure, Ctrl-C, TERM, or
the death of the shell that called us. If this process itself is killed outright, the kernel kills the
command. Standard library only: the launch scripts call it before anything is installed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
GRACE_S = 5.0
_LIBC = ctypes.CDLL(None)


def main(command: list[str]) -> int:
    parent = os.getppid()
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    watched = FORWARDED | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = subprocess.Popen(command, preexec_fn=_in_child)
    if os.getppid() != parent:  # it died before the kernel knew that we follow it
        child.terminate()
    while child.poll() is None:
        info = signal.sigtimedwait(watched, 0.5)
        # A terminal's Ctrl-C (si_code > 0) has reached the command already: it is in our process group.
        if info is not None and info.si_signo in FORWARDED and info.si_code <= 0:
            child.send_signal(info.si_signo)
    end_descendants()
    code = child.returncode
    return code if code >= 0 else 128 - code


def _in_child() -> None:
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED | {signal.SIGCHLD})


def end_descendants() -> None:
    """TERM, then KILL after GRACE_S; a killed process's own children become ours, hence the loop."""
    deadline = time.monotonic() + GRACE_S
    asked: set[int] = set()
    while left := descendants():
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                except ProcessLookupError:
                    pass
        reap()
        time.sleep(0.02)


def reap() -> None:
    """Collect children that have ended, ours and adopted ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def descendants() -> list[int]:
    """Living processes below this one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except (OSError, ValueError):
                continue
            if state != "Z":
                children.setdefault(int(ppid), []).append(int(entry.name))
    found, ahead = [], [os.getpid()]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: tied.py COMMAND [ARGUMENT ...]")
    sys.exit(main(sys.argv[1:]))
