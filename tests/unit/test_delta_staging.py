"""The weight transport `delta`: which folders there are, what an engine makes of them,
what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.train.weights.delta_staging import DeltaFolders
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.tensors.tensor_spec import checksum, raw_bytes
from invrl.weights.transports.delta_folder import (
    DELTA_NAME,
    MANIFEST_NAME,
    DeltaHandle,
    compress,
    decompress,
    load_chain,
)
from invrl.weights.transports.weight_folder import WEIGHTS_NAME

LAYOUT = (
    TensorSpec(name="a", shape=(30, 50), dtype="float32"),
    TensorSpec(name="b", shape=(700,), dtype="bfloat16"),
    TensorSpec(name="c", shape=(), dtype="float32"),
)
Tensors = dict[str, torch.Tensor]


def tensors(version: int) -> Tensors:
    """Each version differs a little from the one before."""
    values_by_name: Tensors = {}
    for spec in LAYOUT:
        values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(1))
        for step in range(version):
            values += 1e-4 * torch.randn(
                spec.shape, generator=torch.Generator().manual_seed(step)
            )
        values_by_name[spec.name] = values.to(getattr(torch, spec.dtype))
    return values_by_name


def stage(
    folders: DeltaFolders, version: int, given: Tensors | None = None
) -> StagedWeights:
    return folders.stage(
        WeightVersion(version), (tensors(version) if given is None else given).items()
    )


def chain(staged: StagedWeights) -> list[str]:
    return list(msgspec.json.decode(staged.handle, type=DeltaHandle).chain)


def names(staged: StagedWeights) -> list[str]:
    return [Path(folder).name for folder in chain(staged)]


def zeros() -> Tensors:
    """What an engine holds that has seen no version."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}


def checksums(held: Tensors) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in held.items()}


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights"


@pytest.fixture
def folders(parent: Path) -> DeltaFolders:
    return DeltaFolders(LAYOUT, parent, full_every=4)


def test_engine_on_the_previous_version_reads_only_deltas(
    folders: DeltaFolders,
) -> None:
    held = zeros()
    for version in range(1, 4):
        staged = stage(folders, version)
        if version > 1:
            # nobody needs it who is up to date
            Path(chain(staged)[0], WEIGHTS_NAME).unlink(missing_ok=True)
        load_chain(chain(staged), LAYOUT, held)
        assert checksums(held) == staged.checksums == checksums(tensors(version))


def test_engine_with_other_weights_loads_whole_weights_first(
    folders: DeltaFolders,
) -> None:
    """Refused as a base, whatever it holds; then brought up by itself."""
    for version in range(1, 4):
        staged = stage(folders, version)
    for held in (zeros(), tensors(7), {**tensors(3), "c": torch.tensor(9.0)}):
        load_chain(chain(staged), LAYOUT, held)
        assert checksums(held) == staged.checksums


def test_engine_that_is_behind_or_ahead_reaches_the_version(
    folders: DeltaFolders,
) -> None:
    first, second, third = (stage(folders, version) for version in (1, 2, 3))
    behind = tensors(1)
    load_chain(chain(third), LAYOUT, behind)
    assert checksums(behind) == third.checksums
    # an update that failed after it had loaded
    load_chain(chain(second), LAYOUT, behind)
    assert checksums(behind) == second.checksums
    assert names(first) == names(third)[:1]


def test_delta_chains_have_a_maximum_length_and_the_previous_chain_stays(
    folders: DeltaFolders, parent: Path
) -> None:
    kept = [names(stage(folders, version)) for version in range(1, 7)]
    assert [len(chain) for chain in kept] == [1, 2, 3, 4, 1, 2]
    assert sorted(path.name for path in parent.iterdir()) == kept[5]
    before = stage(DeltaFolders(LAYOUT, parent, full_every=2), 9)
    assert sorted(path.name for path in parent.iterdir()) == names(before), (
        "what a killed writer left goes"
    )


def test_retried_version_is_whole_and_the_previous_version_stays(
    folders: DeltaFolders,
) -> None:
    stage(folders, 1)
    before = stage(folders, 2)
    stage(folders, 3)
    again = stage(folders, 3, tensors(8))
    assert names(again) == ["version-000003"]
    held = zeros()
    for staged in (again, before):
        load_chain(chain(staged), LAYOUT, held)
        assert checksums(held) == staged.checksums
    assert len(names(stage(folders, 4))) == 2


@pytest.mark.parametrize("fault", ["missing", "shape", "order", "twice"])
def test_tensors_outside_of_the_layout_are_not_staged_and_the_next_version_is_whole(
    folders: DeltaFolders, fault: str
) -> None:
    before = stage(folders, 1)
    named_tensors = list(tensors(2).items())
    faulty = {
        "missing": named_tensors[:1],
        "shape": [("a", torch.zeros(50, 30)), *named_tensors[1:]],
        "order": named_tensors[::-1],
        "twice": [*named_tensors, named_tensors[0]],
    }
    with pytest.raises(LayoutError, match="not those of the layout"):
        folders.stage(WeightVersion(2), faulty[fault])
    staged = stage(folders, 2)
    held = zeros()
    for version in (before, staged):
        load_chain(chain(version), LAYOUT, held)
        assert checksums(held) == version.checksums


def test_small_changes_make_small_delta_files(tmp_path: Path) -> None:
    """One element of a thousand, in the lowest bits."""
    layout = (TensorSpec(name="w", shape=(1000, 100), dtype="bfloat16"),)
    folders = DeltaFolders(layout, tmp_path / "weights", full_every=4)
    weights = torch.randn(1000, 100).to(torch.bfloat16)
    whole = folders.stage(WeightVersion(1), [("w", weights)])
    changed = weights.clone()
    changed.view(torch.int16).view(-1)[::1000] ^= 1
    small = folders.stage(WeightVersion(2), [("w", changed)])
    assert small.num_bytes < 0.01 * whole.num_bytes
    held = {"w": weights.clone()}
    load_chain(chain(small), layout, held)
    assert torch.equal(held["w"], changed)


@pytest.mark.parametrize("engine", ["follows", "is new"])
@pytest.mark.parametrize(
    "fault",
    [
        "gone",
        "no manifest",
        "torn manifest",
        "cut",
        "flipped",
        "another version's",
        "swapped frames",
    ],
)
def test_damaged_delta_changes_no_weight(
    folders: DeltaFolders, fault: str, engine: str
) -> None:
    stage(folders, 1)
    other = stage(folders, 2)
    staged = stage(folders, 3)
    last = Path(chain(staged)[-1])
    manifest = last / MANIFEST_NAME
    delta = last / DELTA_NAME
    body = delta.read_bytes()
    match fault:
        case "gone":
            shutil.rmtree(last)
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:-9])
        case "cut":
            delta.write_bytes(body[: len(body) // 2])
        case "flipped":
            delta.write_bytes(body[:40] + bytes([body[40] ^ 4]) + body[41:])
        case "another version's":
            delta.write_bytes(Path(chain(other)[-1], DELTA_NAME).read_bytes())
        case _:
            written = msgspec.json.decode(manifest.read_bytes())
            frames = written["frames"]
            frames["a"], frames["b"] = frames["b"], frames["a"]
            manifest.write_bytes(msgspec.json.encode(written))
    held = tensors(2) if engine == "follows" else zeros()
    before = checksums(held)
    with pytest.raises(WeightSyncError):
        load_chain(chain(staged), LAYOUT, held)
    assert checksums(held) == before
    load_chain(chain(other), LAYOUT, held)
    assert checksums(held) == other.checksums


def test_delta_frame_of_another_size_is_refused() -> None:
    """It may claim more memory than there is."""
    small, large = (
        TensorSpec(name="w", shape=(size,), dtype="float32") for size in (10, 1000)
    )
    for spec, other_spec in ((small, large), (large, small)):
        frame = compress(torch.zeros(4 * spec.shape[0], dtype=torch.uint8), spec)
        with pytest.raises(WeightSyncError, match="difference of w"):
            decompress(frame, other_spec)


@given(st.data())
def test_delta_frame_restores_every_byte(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    shape = tuple(data.draw(st.lists(st.integers(0, 7), max_size=3)))
    spec = TensorSpec(name="w", shape=shape, dtype=str(dtype).removeprefix("torch."))
    size = torch.empty(shape, dtype=dtype).nbytes
    random = torch.tensor(
        list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8
    )
    assert torch.equal(decompress(compress(random, spec), spec), random)


def test_raw_bytes_of_a_tensor_are_row_major() -> None:
    matrix = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert torch.equal(raw_bytes(matrix.t()), raw_bytes(matrix.t().contiguous()))
    assert not torch.equal(raw_bytes(matrix.t()), raw_bytes(matrix))
