"""Runs one command and ends with it whatever it started: `python launch/tied.py COMMAND ...`.

Two processes. The one that was called passes signals and the exit code on. The one below it adopts every
orphan under the command, and ends all of them when the command ends or when the caller is gone: after
success, failure, Ctrl-C, TERM, and kill -9 of this program or of the shell that started it. Standard
library only: the launch scripts call it before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
WATCHED = PASSED_ON | {signal.SIGCHLD}
REAPER = "--reaper"
GRACE_S = 5.0
"""Between TERM and KILL for what the command left behind."""
ORPHAN_GRACE_S = 10.0
"""The same for the command itself, once nobody waits for it any more."""
_LIBC = ctypes.CDLL(None)


def main(arguments: list[str]) -> int:
    caller = os.getppid()
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if arguments[0] != REAPER:
        return _exit_code(_follow([sys.executable, __file__, REAPER, *arguments], caller, signal.SIGTERM))
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    code = _follow(arguments[1:], caller, signal.SIGKILL)
    end_descendants()
    return _exit_code(code)


def _follow(command: list[str], caller: int, on_our_death: signal.Signals) -> int:
    """Run the command to its end, passing on the signals we get. Its return code."""

    def in_child() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, on_our_death)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    child = subprocess.Popen(command, preexec_fn=in_child)
    kill_at = float("inf")
    while child.poll() is None:
        reap_adopted(child.pid)
        if os.getppid() != caller and kill_at == float("inf"):
            child.terminate()
            kill_at = time.monotonic() + ORPHAN_GRACE_S
        if time.monotonic() > kill_at:
            child.kill()
        info = signal.sigtimedwait(WATCHED, 0.2)
        # A terminal's Ctrl-C (si_code > 0) has reached the command already: same process group.
        if info is not None and info.si_signo in PASSED_ON and info.si_code <= 0:
            child.send_signal(info.si_signo)
    return child.returncode


def _exit_code(returncode: int) -> int:
    """As a shell gives it: 128 + the number of the signal that ended the command."""
    return returncode if returncode >= 0 else 128 - returncode


def end_descendants() -> None:
    """TERM, then KILL after GRACE_S; a killed process's own children become ours, hence the loop."""
    deadline = time.monotonic() + GRACE_S
    asked: set[int] = set()
    while left := descendants():
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        reap()
        time.sleep(0.02)
    reap()


def reap() -> None:
    """Collect children that have ended, ours and adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def reap_adopted(command: int) -> None:
    """Collect children that have ended, but the command: its exit code is for whoever waits for it."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == command:
            return
        os.waitpid(ended.si_pid, 0)


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
