"""A write that all ranks make together: it succeeds on all of them, or all raise.

Otherwise the ranks whose disk has space would wait in the next collective for the one
whose disk has none.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from invrl.errors import DiskFullError, TrainError
from invrl.host.files.disk import is_full

Written = TypeVar("Written")


def write_jointly(folder: Path, write: Callable[[], Written]) -> Written:
    """Return the result of `write`, which writes below `folder` and calls no
    collective. Called on all ranks together. If it fails on any rank, raise on all of
    them: DiskFullError if nothing but space was missing, else TrainError."""
    try:
        written = write()
    except Exception as error:
        _share((str(disk_error(error) or error), is_full(error)), folder, error)
        raise  # not reached: the failures that are shared include this one
    _share(None, folder)
    return written


def _share(
    own: tuple[str, bool] | None, folder: Path, error: Exception | None = None
) -> None:
    """Exchange the failures of all ranks: text, and whether a disk is full. Raises the
    first of them, from this rank's `error`."""
    by_rank: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(by_rank, own)
    failures = {
        rank: failure for rank, failure in enumerate(by_rank) if failure is not None
    }
    if not failures:
        return
    first = min(failures)
    text, _ = failures[first]
    reason = f"rank {first} could not write to {folder}: {text}"
    if all(is_disk_full for _, is_disk_full in failures.values()):
        raise DiskFullError(reason) from error
    raise TrainError(reason) from error


def disk_error(error: BaseException) -> OSError | None:
    """Return the disk's own error, if torch's writer then failed because bytes were
    missing."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause
