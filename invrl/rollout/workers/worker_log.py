"""Output of a rollout worker's process (user code, and the tools that it starts), as a
file of the run.

The file replaces the standard output and the standard error of the process, so it holds
what Python code, C code and child processes print, in one order.

Invariants: only the owner may read the file. When it becomes too long, its oldest part
is removed. Keys are masked in the output of Python, but not in that of child processes.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from invrl.host.files.private_file import make_private
from invrl.host.output.masked_text import mask_output

_LIMIT_BYTES = 64_000_000
_CHECK_INTERVAL_S = 1.0
_STDOUT = 1
_STDERR = 2
"""File descriptors."""


def log_name(worker: str) -> str:
    """Return the name of a worker's file: "rollout worker 0" ->
    "rollout-worker-0.log"."""
    return f"{worker.replace(' ', '-')}.log"


class WorkerLog:
    """The log of this process."""

    def __init__(self, path: Path, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes

    def take_output(self) -> bool:
        """Redirect the output of this process and its children to the file. Returns
        False if the file cannot be written, for example on a machine without the run
        folder: output stays where it was."""
        try:
            make_private(self._path)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            print(
                f"what this worker prints stays here: {self._path} cannot be written: {error}",
                flush=True,
            )
            mask_output()
            return False
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(file, _STDOUT)
        os.dup2(file, _STDERR)
        os.close(file)
        mask_output()
        threading.Thread(
            target=self._keep_short, name="worker-log", daemon=True
        ).start()
        return True

    def _keep_short(self) -> None:
        while True:
            time.sleep(_CHECK_INTERVAL_S)
            with contextlib.suppress(OSError):
                self.shorten()

    def shorten(self) -> bool:
        """Keep only the newer half of a file over the limit, below a line that says so,
        and return True. Output in the meantime may be lost."""
        size = self._path.stat().st_size
        if size <= self._limit_bytes:
            return False
        with self._path.open("rb+", buffering=0) as file:
            file.seek(size - self._limit_bytes // 2)
            tail = file.read(self._limit_bytes // 2)
            _, _, tail = tail.partition(b"\n")
            note = f"[{size - len(tail):,} bytes before this were left out: the file had become too long]\n"
            file.truncate(0)
        # One write in append mode, so that it does not mix with what others append at
        # the same time.
        with self._path.open("ab", buffering=0) as file:
            file.write(note.encode() + tail)
        return True
