"""A file that grows by whole records, also while the disk is full.

Invariant: the file never ends within a record that this process has written. A record
that finds no space waits, and is written before the next one.
"""

import os
from collections import deque
from pathlib import Path

from invrl.host.files.disk import is_full
from invrl.host.files.disk_waits import DiskWait

_MOST_WAITING_BYTES = 64_000_000
"""Beyond this the oldest waiting records are lost."""


class GrowingFile:
    """Appends to the file at `path`. Raises OSError, except for a full disk."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o644)
        self._size = os.fstat(self._descriptor).st_size
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wait = DiskWait(path.parent, f"what belongs into {path.name}")

    @property
    def size(self) -> int:
        """Size in bytes, without the waiting records."""
        return self._size

    def append(self, record: bytes) -> None:
        """Write the record immediately, so that it survives a killed process."""
        self._waiting.append(record)
        self._waiting_bytes += len(record)
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
        self._write_waiting()

    def close(self) -> None:
        """Try once more to write the waiting records."""
        try:
            self._write_waiting()
        finally:
            os.close(self._descriptor)

    def _write_waiting(self) -> None:
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except OSError as error:
                os.ftruncate(self._descriptor, self._size)
                if not is_full(error):
                    raise
                self._wait.goes_on()
                return
            self._waiting_bytes -= len(self._waiting.popleft())
        self._wait.ends()

    def _write(self, record: bytes) -> None:
        written = 0
        while written < len(record):
            written += os.write(self._descriptor, record[written:])
        self._size += len(record)
