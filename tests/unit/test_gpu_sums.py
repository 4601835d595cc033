"""The kernel that sums many tensors, in triton's interpreter, against the sums of the
CPU; and the order of copies and checksums on a GPU, with tensors of the CPU that pass
for a GPU's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from invrl.weights.checksums import checksums
from invrl.weights.checksums.checksums import (
    copy_all,
    hash_and_copy,
    tensor_checksums,
)
from invrl.weights.checksums.multilinear_checksum import whole_checksums


def test_checksum_kernel_equals_the_cpu_checksum() -> None:
    program = """
        import torch
        from invrl.weights.checksums import multilinear_checksum
        from invrl.weights.checksums.gpu_checksums import sums_on_gpu, split_in_tiles
        from invrl.weights.tensors.tensor_slice import TensorSlice

        generator = torch.Generator().manual_seed(0)
        shapes = [(), (7,), (0, 4), (5, 3), (17, 1), (24, 64), (8, 16, 4), (20_000,), (150, 224)]
        matrices = []
        for dtype in (torch.bfloat16, torch.float32, torch.uint8):
            for shape in shapes:
                tensor = (100 * torch.randn(shape, generator=generator)).to(dtype)
                whole = TensorSlice.whole(shape)
                matrices.append(multilinear_checksum._slice_matrix(tensor, whole, shape))
        tensor = torch.randn(9_000, 8, generator=generator)
        for start in (0, 8_000):
            place = TensorSlice(dimension=0, start=start, stop=start + 1_000, index=0, count=9)
            matrices.append(multilinear_checksum._slice_matrix(place.of(tensor), place, (9_000, 8)))
        tensor = torch.randn(64, 96, generator=generator)
        for dimension in (0, 1):
            place = TensorSlice(dimension=dimension, start=32, stop=64, index=1, count=2 + dimension)
            matrices.append(multilinear_checksum._slice_matrix(place.of(tensor), place, (64, 96)))
        tiles = split_in_tiles(matrices)
        sums = [value % 2**64 for value in sums_on_gpu(tiles)]
        assert sums == multilinear_checksum._sums(matrices)
        assert len(set(sums)) == len(matrices) - 2  # three are empty
        assert sums_on_gpu(split_in_tiles(matrices[2:3])) == [0]
        tensor.zero_()  # the last two matrices are of it, the last one is a copy
        again = [value % 2**64 for value in sums_on_gpu(tiles)]
        assert again == [*sums[:-2], 0, sums[-1]], "the words that are there now"
    """
    run_interpreted(program)


def test_tensors_hashed_again_are_read_again() -> None:
    program = """
        import torch
        from invrl.weights.checksums import gpu_checksums, multilinear_checksum
        from invrl.weights.checksums.multilinear_checksum import SumsInPlace
        from invrl.weights.tensors.tensor_slice import TensorSlice

        def check(tensors, *, times):
            calls.clear()
            slices = SumsInPlace({}, places, shapes).slice_checksums(tensors)
            assert known.slice_checksums(tensors) == slices
            assert len(calls) == times, calls
            assert known.whole_checksums(tensors) == SumsInPlace({}, wholes, shapes).whole_checksums(tensors)
            assert len(calls) == times, calls

        calls = []
        work_out = gpu_checksums.split_in_tiles
        gpu_checksums.split_in_tiles = lambda matrices: calls.append(matrices) or work_out(matrices)
        multilinear_checksum._are_on_gpu = lambda tensors: True
        generator = torch.Generator().manual_seed(0)
        tensors = {f"{n}": torch.randn(n, 8, generator=generator) for n in (3, 5, 40)}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        wholes = {name: TensorSlice.whole(shape) for name, shape in shapes.items()}
        places = {name: TensorSlice.whole(shape) for name, shape in shapes.items()}
        known = SumsInPlace(tensors, places, shapes)
        check(tensors, times=1)
        tensors["5"][2, 3] += 1
        check(tensors, times=0)
        check(dict(reversed(tensors.items())), times=0)
        check({"5": tensors["5"]}, times=0)
        check({**tensors, "5": tensors["5"] + 1}, times=0)
        tensors["5"] = torch.randn(8, 5, generator=generator).T
        known = SumsInPlace.of_wholes(tensors)
        for _ in range(2):
            check(tensors, times=0)
            tensors["5"][2, 3] += 1
    """
    run_interpreted(program)


def run_interpreted(program: str) -> None:
    """In a process of its own, because triton decides when it is imported whether it
    interprets."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_gpu_tensors_are_all_copied_and_then_hashed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "_on_gpu", lambda tensors: True)
    monkeypatch.setattr(checksums, "_BATCH_BYTES", 100)
    tensors = {
        f"{index}": torch.full((4, 2 + index), index + 0.5) for index in range(5)
    }
    tensors["scalar"] = torch.tensor(3.5, dtype=torch.bfloat16)
    places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    hashed: list[list[str]] = []

    def hash_tensors(written):
        hashed.append(list(written))
        return whole_checksums(written)

    copied = copy_all(places, iter(tensors.items()), hash_tensors)
    assert all(torch.equal(places[name], tensor) for name, tensor in tensors.items())
    assert copied == whole_checksums(tensors)
    assert hashed == [list(tensors)]
    places["1"][0, 0] = 9.0
    held = tensor_checksums(places, hash_tensors)
    assert [name for name in held if held[name] != copied[name]] == ["1"]


def test_gpu_has_written_the_host_memory_that_is_hashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process with a GPU copies into host memory, and does not wait for each copy."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(checksums, "_BATCH_BYTES", 90)

    def upload(tensor, device, *, non_blocking):
        calls.append(f"to {device}")
        return tensor.clone()

    def hash_tensors(written):
        calls.append("hash")
        return whole_checksums(written)

    tensors = {f"{index}": torch.rand(3, 4) for index in range(3)}  # two batches
    for copy, order in (
        (copy_all, ["wait", "to cuda", "to cuda", "hash", "to cuda", "hash"]),
        (hash_and_copy, ["hash", "hash", "wait"]),
    ):
        places = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "to", upload)
            copied = copy(places, iter(tensors.items()), hash_tensors)
        assert copied == whole_checksums(places) == whole_checksums(tensors)
        assert calls == order
        calls.clear()


def test_source_tensor_is_not_broadcast_over_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksums, "_on_gpu", lambda tensors: True)
    with pytest.raises(ValueError, match=r"x: a tensor .* does not fit"):
        copy_all({"x": torch.zeros(3)}, [("x", torch.zeros(1))], whole_checksums)
