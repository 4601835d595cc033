"""The arena: two slots, read by other processes, checked on the way in."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter, map_arena
from invrl.weights.transports.slot_lease import SlotLease

SPECS = (
    TensorSpec(name="a", shape=(3, 5), dtype="float32"),
    TensorSpec(name="b", shape=(7,), dtype="bfloat16"),
    TensorSpec(name="c", shape=(2, 2, 2), dtype="float32"),
)


NUM_BYTES = 15 * 4 + 7 * 2 + 8 * 4
READER = """
import sys
from tests.unit.test_weight_arena import checksum, read_handle

view = read_handle(sys.argv[1])["c"]
print(checksum(view))
view.zero_()
again = read_handle(sys.argv[1])["c"]
print(checksum(again))
"""

Tensors = dict[str, torch.Tensor]


def tensors(seed: int) -> Tensors:
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn: Tensors = {}
    for spec in SPECS:
        values = torch.randn(spec.shape, generator=generator)
        dtype = getattr(torch, spec.dtype)
        drawn[spec.name] = values.to(dtype)
    return drawn


def stage(
    writer: ArenaWriter,
    *,
    version: int,
    seed: int,
) -> StagedWeights:
    return writer.stage(
        WeightVersion(version),
        tensors(seed).items(),
    )


def place_of(staged: StagedWeights) -> ArenaHandle:
    return msgspec.json.decode(staged.handle, type=ArenaHandle)


def read_handle(handle: str) -> Tensors:
    place = msgspec.json.decode(handle, type=ArenaHandle)
    slots = map_arena(place.path, SPECS)
    return slots[place.slot]


def assert_holds(staged: StagedWeights, *, seed: int) -> None:
    """Read through its handle, as an engine does."""
    read = read_handle(staged.handle)
    for name, tensor in tensors(seed).items():
        assert torch.equal(read[name], tensor)


def test_arena_reads_back_the_staged_tensors() -> None:
    writer = ArenaWriter(SPECS)
    staged = stage(writer, version=1, seed=1)
    assert_holds(staged, seed=1)
    for name, tensor in tensors(1).items():
        assert staged.checksums[name] == checksum(tensor)
    assert staged.num_bytes == NUM_BYTES


def test_previous_version_stays_whole_and_a_repeated_version_keeps_its_slot() -> None:
    writer = ArenaWriter(SPECS)
    first = stage(writer, version=1, seed=1)
    second = stage(writer, version=2, seed=2)
    assert_holds(first, seed=1)

    repeated = stage(writer, version=2, seed=3)
    assert repeated.handle == second.handle
    assert_holds(first, seed=1)
    assert_holds(repeated, seed=3)

    third = stage(writer, version=3, seed=4)
    assert third.handle == first.handle
    assert_holds(repeated, seed=3)


def test_one_slot_is_written_while_the_other_is_read() -> None:
    writer = ArenaWriter(SPECS)
    place = place_of(stage(writer, version=1, seed=1))
    other_slot = 1 - place.slot
    with (
        SlotLease(place.path, place.slot, writes=False),
        SlotLease(place.path, other_slot, writes=True),
        pytest.raises(WeightSyncError, match="still reads slot"),
    ):
        SlotLease(place.path, place.slot, writes=True)


def test_other_process_can_read_the_arena_and_not_write() -> None:
    writer = ArenaWriter(SPECS)
    staged = stage(writer, version=1, seed=5)
    reader = subprocess.run(
        [sys.executable, "-c", READER, staged.handle],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    unchanged = staged.checksums["c"]
    assert reader.stdout.split() == [unchanged, unchanged]


@pytest.mark.parametrize(
    ("name", "misfit", "reason"),
    [
        ("a", torch.zeros(5, 3), "a: torch.float32"),
        ("b", torch.zeros(7), "b: torch.float32"),
        ("z", torch.zeros(1), "z: not in the layout"),
    ],
    ids=["other shape", "other dtype", "other name"],
)
def test_tensors_that_do_not_fit_the_arena_are_refused(
    name: str,
    misfit: torch.Tensor,
    reason: str,
) -> None:
    writer = ArenaWriter(SPECS)
    changed = tensors(1) | {name: misfit}
    with pytest.raises(LayoutError, match=reason):
        writer.stage(WeightVersion(1), changed.items())


def test_missing_tensors_are_refused() -> None:
    writer = ArenaWriter(SPECS)
    only_one = [("a", tensors(1)["a"])]
    reason = "2 tensors were not staged"
    with pytest.raises(LayoutError, match=reason):
        writer.stage(WeightVersion(1), only_one)


def test_tensor_staged_twice_is_refused() -> None:
    writer = ArenaWriter(SPECS)
    twice = [*tensors(1).items(), ("a", tensors(1)["a"])]
    with pytest.raises(LayoutError, match="a: staged twice"):
        writer.stage(WeightVersion(1), twice)


def test_arena_smaller_than_its_layout_is_an_error() -> None:
    writer = ArenaWriter(SPECS)
    place = place_of(stage(writer, version=1, seed=1))
    more = TensorSpec(name="d", shape=(4096,), dtype="float32")
    with pytest.raises(RuntimeError):
        map_arena(place.path, (*SPECS, more))


@pytest.mark.parametrize("path", ["/proc/self/fd/987654", "/dev/null"])
def test_missing_arena_is_an_error(path: str) -> None:
    with pytest.raises(RuntimeError):
        map_arena(path, SPECS)


def test_arena_has_no_name_in_the_file_system() -> None:
    """The arena is a memfd: it has no name to be left behind."""
    writer = ArenaWriter(SPECS)
    place = place_of(stage(writer, version=1, seed=1))
    assert "memfd:invrl-weights" in os.readlink(place.path)
    assert os.stat(place.path).st_nlink == 0


def test_arena_layout_with_a_duplicate_name_is_refused() -> None:
    with pytest.raises(LayoutError, match="twice"):
        ArenaWriter((*SPECS, SPECS[0]))


def test_size_of_an_arena_cannot_be_changed() -> None:
    """A process that maps it would be killed when it touches what was cut off."""
    writer = ArenaWriter(SPECS)
    place = place_of(stage(writer, version=1, seed=1))
    size = os.stat(place.path).st_size
    for other_size in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.truncate(place.path, other_size)
    assert os.stat(place.path).st_size == size
