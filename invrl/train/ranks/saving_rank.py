"""Common base of policy and critic ranks: each saves its share of a checkpoint.

Either immediately, or during training: then the state is copied, another thread writes
the copy, and all ranks end it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from invrl.errors import DiskFullError
from invrl.host.files.disk import is_full
from invrl.types.file_entry import FileEntries

if TYPE_CHECKING:
    from invrl.train.ranks.saved_state import SavedState, Saving


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise DiskFullError where torch reports that a rank found its disk full."""
    try:
        yield
    except BaseException as error:  # torch's is none of the usual exceptions
        from torch.distributed.checkpoint import api

        if isinstance(error, api.CheckpointException):
            for rank, (failure, _) in error.failures.items():
                if is_full(failure):
                    raise DiskFullError(f"rank {rank}: {failure}") from None
        raise


class SavingRank:
    def __init__(self, state: SavedState, load: Callable[[str], None]) -> None:
        """`load` loads this rank's share of the checkpoint at a path."""
        self._state = state
        self._load = load
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Saving | None = None
        self.state_written: Future[None] = Future()
        """Done when the checkpoint copied last by `copy_checkpoint` is written."""

    def save_checkpoint(self, path: str) -> FileEntries:
        """Save model, optimizer, schedule and random state; all ranks together. The
        folder must be empty or new. Returns the entries of the files that this rank has
        written."""
        with disk_errors():
            return self._state.save(path)

    def copy_checkpoint(self, path: str) -> None:
        """Copy what `save_checkpoint` saves, and begin to write it during training; all
        ranks together. Once `state_written` is done on all ranks, `finish_checkpoint`
        follows."""
        self._saving = self._state.copy(path)
        self.state_written = self._writer.submit(self._saving.write)

    def finish_checkpoint(self) -> FileEntries:
        """End what `copy_checkpoint` began; all ranks together. Returns like
        `save_checkpoint`."""
        assert self._saving is not None, "no checkpoint is being written"
        saving = self._saving
        self._saving = None
        with disk_errors():
            return saving.finish()

    def load_checkpoint(self, path: str) -> None:
        self._load(path)
