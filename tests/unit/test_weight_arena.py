"""The arena: two slots, read by other processes, checked on the way in."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from invrl.errors import LayoutError, WeightSyncError
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.tensors.tensor_spec import checksum
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter, map_arena
from invrl.weights.transports.slot_lease import SlotLease

SPECS = (
    TensorSpec(name="a", shape=(3, 5), dtype="float32"),
    TensorSpec(name="b", shape=(7,), dtype="bfloat16"),
    TensorSpec(name="c", shape=(2, 2, 2), dtype="float32"),
)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype))
        for s in SPECS
    }


def read(handle: str) -> dict[str, torch.Tensor]:
    at = msgspec.json.decode(handle, type=ArenaHandle)
    return map_arena(at.path, SPECS)[at.slot]


def test_arena_reads_back_the_staged_tensors() -> None:
    writer = ArenaWriter(SPECS)
    staged = writer.stage(WeightVersion(1), tensors(1).items())
    for name, tensor in tensors(1).items():
        assert torch.equal(read(staged.handle)[name], tensor)
        assert staged.checksums[name] == checksum(tensor)
    assert staged.num_bytes == 15 * 4 + 7 * 2 + 8 * 4


def test_previous_version_stays_whole_and_a_repeated_version_keeps_its_slot() -> None:
    writer = ArenaWriter(SPECS)
    first = writer.stage(WeightVersion(1), tensors(1).items())
    second = writer.stage(WeightVersion(2), tensors(2).items())
    assert torch.equal(read(first.handle)["a"], tensors(1)["a"])
    again = writer.stage(WeightVersion(2), tensors(3).items())
    assert again.handle == second.handle
    assert torch.equal(read(first.handle)["a"], tensors(1)["a"])
    assert torch.equal(read(again.handle)["a"], tensors(3)["a"])
    third = writer.stage(WeightVersion(3), tensors(4).items())
    assert third.handle == first.handle
    assert torch.equal(read(again.handle)["a"], tensors(3)["a"])


def test_one_slot_is_written_while_the_other_is_read() -> None:
    staged = ArenaWriter(SPECS).stage(WeightVersion(1), tensors(1).items())
    arena = msgspec.json.decode(staged.handle, type=ArenaHandle)
    with (
        SlotLease(arena.path, arena.slot, writes=False),
        SlotLease(arena.path, 1 - arena.slot, writes=True),
        pytest.raises(WeightSyncError, match="still reads slot"),
    ):
        SlotLease(arena.path, arena.slot, writes=True)


def test_other_process_can_read_the_arena_and_not_write() -> None:
    writer = ArenaWriter(SPECS)
    staged = writer.stage(WeightVersion(1), tensors(5).items())
    program = (
        "import sys; from tests.unit.test_weight_arena import checksum, read; view = read(sys.argv[1])['c'];"
        "print(checksum(view)); view.zero_(); print(checksum(read(sys.argv[1])['c']))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, staged.handle],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert out.stdout.split() == [staged.checksums["c"]] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t | {"a": torch.zeros(5, 3)}, "a: torch.float32"),
        (lambda t: t | {"b": torch.zeros(7)}, "b: torch.float32"),
        (lambda t: t | {"z": torch.zeros(1)}, "z: not in the layout"),
        (lambda t: {"a": t["a"]}, "2 tensors were not staged"),
    ],
)
def test_tensors_that_do_not_fit_the_arena_are_refused(change, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        ArenaWriter(SPECS).stage(WeightVersion(1), change(tensors(1)).items())


def test_tensor_staged_twice_is_refused() -> None:
    twice = [*tensors(1).items(), ("a", tensors(1)["a"])]
    with pytest.raises(LayoutError, match="a: staged twice"):
        ArenaWriter(SPECS).stage(WeightVersion(1), twice)


def test_missing_or_too_small_arena_is_an_error() -> None:
    writer = ArenaWriter(SPECS)
    handle = msgspec.json.decode(
        writer.stage(WeightVersion(1), tensors(1).items()).handle, type=ArenaHandle
    )
    with pytest.raises(RuntimeError):
        map_arena(
            handle.path, (*SPECS, TensorSpec(name="d", shape=(4096,), dtype="float32"))
        )
    for path in ("/proc/self/fd/987654", "/dev/null"):
        with pytest.raises(RuntimeError):
            map_arena(path, SPECS)


def test_arena_has_no_name_in_the_file_system() -> None:
    """The arena is a memfd: it has no name to be left behind."""
    handle = msgspec.json.decode(
        ArenaWriter(SPECS).stage(WeightVersion(1), tensors(1).items()).handle,
        type=ArenaHandle,
    )
    assert "memfd:invrl-weights" in os.readlink(handle.path)
    assert os.stat(handle.path).st_nlink == 0


def test_arena_layout_with_a_duplicate_name_is_refused() -> None:
    with pytest.raises(LayoutError, match="twice"):
        ArenaWriter((*SPECS, SPECS[0]))


def test_size_of_an_arena_cannot_be_changed() -> None:
    """A process that maps it would be killed when it touches what was cut off."""
    writer = ArenaWriter(SPECS)
    staged = writer.stage(WeightVersion(1), tensors(1).items())
    path = msgspec.json.decode(staged.handle, type=ArenaHandle).path
    size = os.stat(path).st_size
    for other_size in (0, size - 1, size + 1):
        with pytest.raises(PermissionError):
            os.truncate(path, other_size)
    assert os.stat(path).st_size == size
