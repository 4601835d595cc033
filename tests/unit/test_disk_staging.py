"""The weight transport `disk`: which folders there are, and what an engine refuses to
read."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.train.weights.disk_staging import WeightFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.weight_folder import WEIGHTS_NAME, read_folder

LAYOUT = (
    TensorSpec(name="a", shape=(3, 5), dtype="float32"),
    TensorSpec(name="b", shape=(7,), dtype="bfloat16"),
)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype))
        for s in LAYOUT
    }


def stage(
    folders: WeightFolders, version: int, seed: int | None = None
) -> StagedWeights:
    return folders.stage(
        WeightVersion(version), tensors(version if seed is None else seed).items()
    )


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


def test_staged_folder_is_read_back_also_by_safetensors(parent: Path) -> None:
    staged = stage(WeightFolders(LAYOUT, parent), 1)
    for read in (
        read_folder(staged.handle, LAYOUT),
        load_file(Path(staged.handle) / WEIGHTS_NAME),
    ):
        assert {
            name: checksum(tensor) for name, tensor in read.items()
        } == staged.checksums
        assert all(
            torch.equal(read[name], tensor) for name, tensor in tensors(1).items()
        )
    assert staged.num_bytes == 3 * 5 * 4 + 7 * 2


def test_previous_version_folder_stays_and_older_ones_are_removed(parent: Path) -> None:
    folders = WeightFolders(LAYOUT, parent)
    first = stage(folders, 1)
    stage(folders, 2)
    assert names(parent) == ["version-000001", "version-000002"]
    still_read = read_folder(first.handle, LAYOUT)
    stage(folders, 3)
    assert names(parent) == ["version-000002", "version-000003"]
    assert torch.equal(still_read["a"], tensors(1)["a"]), (
        "who reads a folder that goes keeps its bytes"
    )
    stage(folders, 3, seed=9)  # a failed update is tried again
    assert names(parent) == ["version-000002", "version-000003"]


def test_only_files_of_a_killed_writer_are_removed(parent: Path) -> None:
    (parent / "version-000007.partial").mkdir(parents=True)
    stage(WeightFolders(LAYOUT, parent), 5)
    (parent / "of the user").mkdir()
    WeightFolders(LAYOUT, parent)
    assert names(parent) == ["of the user"]


@contextmanager
def little_room() -> Iterator[None]:
    """No file of this process may be longer than 100 bytes: also not the one that
    pytest writes its own output to, so nothing may be printed in here."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_failed_write_leaves_the_previous_version_whole(parent: Path) -> None:
    folders = WeightFolders(LAYOUT, parent)
    first = stage(folders, 1)
    message = r"version 2 cannot be written to .*--weights.folder"
    with pytest.raises(WeightSyncError, match=message), little_room():
        stage(folders, 2)
    assert names(parent) == ["version-000001"]
    assert torch.equal(read_folder(first.handle, LAYOUT)["a"], tensors(1)["a"])


@pytest.mark.parametrize("fault", ["missing", "shape", "order", "twice"])
def test_folder_with_tensors_outside_of_the_layout_is_not_staged(
    parent: Path, fault: str
) -> None:
    named_tensors = list(tensors(1).items())
    faulty = {
        "missing": named_tensors[:1],
        "shape": [("a", torch.zeros(5, 3)), named_tensors[1]],
        "order": named_tensors[::-1],
        "twice": [*named_tensors, named_tensors[0]],
    }
    folders = WeightFolders(LAYOUT, parent)
    with pytest.raises(LayoutError, match="not those of the layout"):
        folders.stage(WeightVersion(1), faulty[fault])
    assert names(parent) == []


@pytest.mark.parametrize("fault", ["missing", "dtype", "one more"])
def test_folder_of_another_layout_is_refused_before_loading(
    tmp_path: Path, fault: str
) -> None:
    held = tensors(1)
    faulty = {
        "missing": {"a": held["a"]},
        "dtype": {**held, "b": held["b"].to(torch.float16)},
        "one more": {**held, "c": held["b"].clone()},
    }
    save_file(faulty[fault], tmp_path / WEIGHTS_NAME)
    with pytest.raises(LayoutError, match="the layout says"):
        read_folder(str(tmp_path), LAYOUT)


def test_missing_or_truncated_weight_folder_is_named(
    tmp_path: Path, parent: Path
) -> None:
    with pytest.raises(WeightSyncError, match=r"nowhere.*cannot be read"):
        read_folder(str(tmp_path / "nowhere"), LAYOUT)
    staged = stage(WeightFolders(LAYOUT, parent), 1)
    path = Path(staged.handle) / WEIGHTS_NAME
    for size in (path.stat().st_size - 1, 9, 0):
        with path.open("rb+") as file:
            file.truncate(size)
        with pytest.raises(WeightSyncError, match="cannot be read"):
            read_folder(staged.handle, LAYOUT)
