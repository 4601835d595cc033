"""Leases for reading or writing a slot of the arena, which the kernel takes back when
the holder dies.

Many may read a slot, or one may write it: an advisory lock of an open file on the
arena's byte with the slot's number. It ends with `release`, or when the last process
that has the file open ends in any way.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import AbstractContextManager

from invrl.errors import WeightSyncError

_RETRY_S = 0.01


class SlotLease(AbstractContextManager["SlotLease"]):
    """Lease of one slot. Raises WeightSyncError if the slot is not free within
    `wait_s`, or if the arena is gone."""

    def __init__(
        self, path: str, slot: int, *, writes: bool, wait_s: float = 0.0
    ) -> None:
        mode = os.O_RDWR if writes else os.O_RDONLY
        kind = fcntl.F_WRLCK if writes else fcntl.F_RDLCK
        try:
            self._file = os.open(path, mode)
        except OSError as error:
            raise WeightSyncError(
                f"the weight arena {path} cannot be opened: {error}"
            ) from error
        deadline = time.monotonic() + wait_s
        while not self._acquire(kind, slot):
            if time.monotonic() >= deadline:
                self.release()
                user = "an engine still reads" if writes else "the trainer writes"
                raise WeightSyncError(
                    f"{user} slot {slot} of the weight arena, waited {wait_s:g} s"
                )
            time.sleep(_RETRY_S)

    def _acquire(self, kind: int, slot: int) -> bool:
        # struct flock: type, whence, first byte, number of bytes, pid (0 for a lock of
        # the open file)
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def release(self) -> None:
        os.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.release()
