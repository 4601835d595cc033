"""The process that outlives a killed driver just long enough to end what the driver started.

Servers that we start die with us through PR_SET_PDEATHSIG. Ray's own processes do not all: after kill -9 of a
driver its raylet goes at once, its agents linger for up to a minute. The guardian remembers the driver's
descendants while it lives and kills whichever are left once it is gone. Invariant: it never touches a process
that was not a descendant of the driver (start time included). Started by `cluster.py`."""

import contextlib
import signal
import subprocess
import sys

import psutil

from invrl.process import still_running

_LOOK_EVERY_S = 2.0
_GRACE_S = 3.0


def start_guardian(pid: int) -> subprocess.Popen[bytes]:
    """Watch process `pid` from a session of its own, so that Ctrl-C and a killed group pass it by."""
    return subprocess.Popen(
        [sys.executable, "-m", "invrl.guardian", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def guard(pid: int) -> None:
    """Returns when `pid` is gone and everything below it too."""
    me = psutil.Process()
    family: dict[tuple[int, float], psutil.Process] = {}
    try:
        driver = psutil.Process(pid)
        while driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE:
            for child in driver.children(recursive=True):
                if child != me:
                    family.setdefault((child.pid, child.create_time()), child)
            family = {key: child for key, child in family.items() if child.is_running()}
            with contextlib.suppress(psutil.TimeoutExpired):
                driver.wait(timeout=_LOOK_EVERY_S)
    except psutil.NoSuchProcess:
        pass
    # Late grandchildren of the known ones, then the known ones themselves.
    for process in list(family.values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in process.children(recursive=True):
                family.setdefault((child.pid, child.create_time()), child)
    for process in still_running(family.values(), within_s=_GRACE_S):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    guard(int(sys.argv[1]))
