"""A rank whose disk fails still gathers with the others, and says what failed."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from invrl.train.ranks.checkpoint_writer import LateTensors, _Writer


class Planner:
    """Each item is a few bytes."""

    def resolve_data(self, item: WriteItem) -> io.BytesIO:
        return io.BytesIO(b"state")


def write(folder: Path) -> tuple[list[str], _Writer]:
    """What was gathered, and the writer of a rank with one item."""
    gathered: list[str] = []

    def gather() -> torch.Tensor | None:
        gathered.append("here")
        return None

    late = LateTensors()
    late.add(4, gather)
    writer = _Writer(folder, late, {})
    item = WriteItem(MetadataIndex("state"), WriteItemType.BYTE_IO)
    planner: Any = Planner()
    writer.prepare_write_data(
        SavePlan([item], storage_data=_StoragePrefix("__0_")), planner
    )
    work, *_ = writer.get_save_function_and_args()
    work()
    return gathered, writer


def test_local_tensors_are_written_before_gathered_tensors(tmp_path: Path) -> None:
    gathered, writer = write(tmp_path)
    assert gathered == ["here"]
    assert writer.failure is None
    sizes = [result.size_in_bytes for result in writer.retrieve_write_results()]
    assert sizes == [5]
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"state"


def test_file_that_cannot_be_created_is_reported_as_this_ranks_error(
    tmp_path: Path,
) -> None:
    gathered, writer = write(tmp_path / "missing")
    assert gathered == ["here"]
    assert isinstance(writer.failure, FileNotFoundError)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="there is no device that is always full"
)
def test_disk_full_on_closing_is_reported_as_this_ranks_error(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    gathered, writer = write(tmp_path)
    assert gathered == ["here"]
    assert isinstance(writer.failure, OSError)
    assert writer.failure.errno == errno.ENOSPC
