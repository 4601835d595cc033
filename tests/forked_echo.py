"""A server for tests of `invrl.host.processes.fork_parent`: it says what it was started
with, then does what it is told by its first argument, and waits for the end of its
standard output's file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

IMPORTED_IN = os.getpid()
THREADS_OF_LIBRARIES = os.environ.get("OMP_NUM_THREADS")


def prepare() -> None:
    os.environ["PREPARED"] = "by the module"


def main(arguments: Sequence[str]) -> None:
    what, *descriptors = arguments
    for descriptor in descriptors:
        os.write(int(descriptor), b"written by the fork")
        os.close(int(descriptor))
    facts = {
        "imported here": os.getpid() == IMPORTED_IN,
        "folder": os.getcwd(),
        "GIVEN": os.environ.get("GIVEN"),
        "PREPARED": os.environ.get("PREPARED"),
        "group": os.getpgid(0) == os.getpid(),
        "threads of libraries": THREADS_OF_LIBRARIES,
    }
    print(facts, flush=True)
    if what == "fail":
        sys.exit(3)
    if what == "sleep":
        time.sleep(3600)
