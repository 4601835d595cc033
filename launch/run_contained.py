"""`python launch/run_contained.py COMMAND ...` runs the command and ends everything
that it started.

There are two processes. The first one, which was called, passes signals and the exit
code on. The second one, below it, adopts every orphan of the command. It ends all of
them when the command ends or the caller is gone: after success, failure, Ctrl-C,
SIGTERM, and kill -9 of this program or of the shell that started it.

The launch scripts call this before anything is installed, so it uses only the standard
library, and `invrl/host/processes/descendants.py` from the same checkout.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from invrl.host.processes.descendants import (
    adopt_orphans,
    collect_ended_children,
    die_with_parent,
    end_descendants,
)

PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
WATCHED = PASSED_ON | {signal.SIGCHLD}
REAPER_FLAG = "--reaper"
"""The first argument of the second process."""
POLL_INTERVAL_S = 0.2
DESCENDANT_GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for what the command left behind."""
COMMAND_GRACE_S = 10.0
"""Between SIGTERM and SIGKILL for the command itself, once the caller is gone."""


def main(arguments: list[str]) -> int:
    caller = os.getppid()
    die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if arguments[0] == REAPER_FLAG:
        adopt_orphans()
        exit_code = run_command(
            arguments[1:], caller=caller, signal_on_our_death=signal.SIGKILL
        )
        end_descendants(terminate=True, grace_s=DESCENDANT_GRACE_S)
    else:
        reaper = [sys.executable, __file__, REAPER_FLAG, *arguments]
        exit_code = run_command(
            reaper, caller=caller, signal_on_our_death=signal.SIGTERM
        )
    return exit_code


def run_command(
    command: list[str], *, caller: int, signal_on_our_death: signal.Signals
) -> int:
    """Run the command to its end and pass signals on to it. Returns the exit code that
    a shell would give."""

    def in_child() -> None:
        die_with_parent(signal_on_our_death)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)

    child = subprocess.Popen(command, preexec_fn=in_child)
    kill_at = math.inf
    while child.poll() is None:
        collect_ended_children(except_pid=child.pid)
        caller_is_gone = os.getppid() != caller
        if caller_is_gone and kill_at == math.inf:
            child.terminate()
            kill_at = time.monotonic() + COMMAND_GRACE_S
        if time.monotonic() > kill_at:
            child.kill()
        info = signal.sigtimedwait(WATCHED, POLL_INTERVAL_S)
        # A terminal's Ctrl-C (si_code > 0) has reached the command already: it is in
        # the same process group.
        if info is not None and info.si_signo in PASSED_ON and info.si_code <= 0:
            child.send_signal(info.si_signo)
    if child.returncode < 0:
        return 128 - child.returncode
    return child.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: run_contained.py COMMAND [ARGUMENT ...]")
    sys.exit(main(sys.argv[1:]))
