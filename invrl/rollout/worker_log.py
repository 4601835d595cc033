"""What a rollout worker's process prints (user code, and the tools that it starts), as a file of the run.

The process's standard output and error become the file: of Python, of C code, and of child processes, in one
order. Invariants: only its owner may read the file; beyond a bound the oldest part of it goes; it has no
session key that went through Python's `print` or `logging` (what a child process prints is not looked at)."""

import contextlib
import io
import os
import re
import sys
import threading
from pathlib import Path

from invrl.host.private_file import make_private

_LIMIT_BYTES = 64_000_000
_CHECK_EVERY_S = 1.0
_SESSION_KEY = re.compile(r"isk-[A-Za-z0-9_=-]{8,}")
_HIDDEN = "(session key)"


def log_name(worker: str) -> str:
    """The file of the worker that is called this: "rollout worker 0" -> "rollout-worker-0.log"."""
    return f"{worker.replace(' ', '-')}.log"


class WorkerLog:
    """The log of this process."""

    def __init__(self, path: Path, *, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes

    def take_output(self) -> None:
        """From now on, whatever this process and its children print is in the file. Where it cannot be
        written, as on a machine that lacks the run folder, output goes on to where it went."""
        try:
            make_private(self._path)
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            print(f"what this worker prints stays here: {self._path} cannot be written: {error}", flush=True)
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        sys.stdout = _MaskedText(1)
        sys.stderr = _MaskedText(2)
        threading.Thread(target=self._bound, name="worker-log", daemon=True).start()

    def _bound(self) -> None:
        pause = threading.Event()
        while not pause.wait(_CHECK_EVERY_S):
            with contextlib.suppress(OSError):
                self.shorten()

    def shorten(self) -> bool:
        """Over the limit only its newer half is kept, below a line that says so; False if it is not over.
        What is printed in between may be lost."""
        size = self._path.stat().st_size
        if size <= self._limit_bytes:
            return False
        with self._path.open("rb+", buffering=0) as file:
            file.seek(size - self._limit_bytes // 2)
            tail = file.read(self._limit_bytes // 2)
            _, _, tail = tail.partition(b"\n")
            note = f"[{size - len(tail):,} bytes before this were left out: the file had become too long]\n"
            file.truncate(0)
        # In one write at the end: what others append meanwhile stays whole.
        with self._path.open("ab", buffering=0) as file:
            file.write(note.encode() + tail)
        return True


class _MaskedText(io.TextIOWrapper):
    """A line-buffered text stream to a file descriptor, which it does not close, without session keys."""

    def __init__(self, number: int) -> None:
        raw = io.FileIO(number, "w", closefd=False)
        super().__init__(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )

    def write(self, text: str) -> int:
        super().write(_SESSION_KEY.sub(_HIDDEN, text))
        return len(text)
