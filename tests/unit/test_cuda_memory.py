"""The arena in a GPU's memory, without a GPU: handles and errors against a driver of
this test, and the whole way into an engine with shared memory in the place of the
GPU's. On a GPU: `test_cuda_arena.py`."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import types
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from loader_engines import (
    LAYOUT,
    SLICED_LAYOUT,
    LoaderEngine,
    SlicedEngine,
    receiver_of,
    sliced_values,
)
from shared_gpu_memory import GPU, use_shared_memory

from invrl.engines.client.weight_receiver import ArenaReceiver
from invrl.errors import ChecksumError, LayoutError, WeightSyncError
from invrl.host.gpus import VISIBLE_VARIABLE, own_gpu_first
from invrl.interfaces import StagedWeights
from invrl.types.weights import TensorSpec, WeightVersion
from invrl.weights.checksums.multilinear_checksum import whole_checksums
from invrl.weights.config import ArenaWeights
from invrl.weights.transports import cuda_memory
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter, open_arena
from invrl.weights.transports.cuda_memory import CudaHandle
from invrl.weights.update.committed import load_verified

UUIDS = ["GPU-11111111-0000", "22222222-0000"]


class Driver:
    """libcuda: an address is a number, and a handle says it."""

    def __init__(self) -> None:
        self.device = -1
        """That the calling thread's context is of."""
        self.opened: list[tuple[int, int]] = []
        self.status = 0

    def cuMemAlloc_v2(self, address, num_bytes) -> int:
        address._obj.value = 4096 * (1 + self.device)
        return self.status

    def cuIpcGetMemHandle(self, handle, address) -> int:
        handle._obj.reserved[:8] = address.value.to_bytes(8, "little")
        handle._obj.reserved[63] = 7
        return 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags) -> int:
        assert handle.reserved[63] == 7
        assert flags.value == 1
        address._obj.value = int.from_bytes(bytes(handle.reserved[:8]), "little")
        self.opened.append((self.device, address._obj.value))
        return self.status

    def cuIpcCloseMemHandle(self, address) -> int:
        self.opened.remove((self.device, address.value))
        return 0

    def cuGetErrorName(self, status, name) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_HANDLE"
        return 0


class OpenedBytes:
    """In the place of a tensor: it refers to what it is over."""

    def __init__(self, memory: Any, device_index: int) -> None:
        self.memory = memory
        self.device_index = device_index


def place_of(opened: Any) -> tuple[int, int, int]:
    """Address, bytes and GPU."""
    interface = opened.memory.__cuda_array_interface__
    return interface["data"][0], interface["shape"][0], opened.device_index


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        fake.device = index
        yield
        fake.device = -1

    monkeypatch.setattr(cuda_memory, "_driver", lambda: fake)
    monkeypatch.setattr(cuda_memory, "_tensor_over", OpenedBytes)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: types.SimpleNamespace(uuid=UUIDS[index]),
    )
    return fake


def test_a_handle_opens_the_memory_on_the_gpu_of_its_uuid(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, handle = cuda_memory.allocate(1000, torch.device("cuda", 1))
    assert place_of(memory) == (8192, 1000, 1)
    sent = msgspec.json.encode(handle)
    fields = json.loads(sent)
    assert fields["device_uuid"] == "22222222-0000"
    assert fields["num_bytes"] == 1000
    assert fields["offset"] == 0
    assert len(base64.b64decode(fields["ipc_handle"])) == 64
    received = msgspec.json.decode(sent, type=CudaHandle)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: types.SimpleNamespace(uuid=UUIDS[1 - index]),
    )
    opened = cuda_memory.open_memory(received)
    # this process numbers the GPUs otherwise
    assert place_of(opened) == (8192, 1000, 0)
    assert driver.opened == [(0, 8192)]
    del opened
    assert driver.opened == []
    later = msgspec.structs.replace(received, offset=64)
    assert place_of(cuda_memory.open_memory(later)) == (8256, 1000, 0)
    assert driver.opened == []  # closed where it was opened, not at the offset


def test_rank_writes_into_the_arena_on_the_gpu_of_another_rank(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two ranks number two GPUs: each has its own as GPU 0."""
    plans = [own_gpu_first(rank, 2, {VISIBLE_VARIABLE: "7,3"}) for rank in (0, 1)]
    assert plans == ["7,3", "3,7"]
    uuid_of = dict(zip(("7", "3"), UUIDS, strict=True))

    def become(rank: int) -> None:
        shown = [uuid_of[name] for name in plans[rank].split(",")]
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: types.SimpleNamespace(uuid=shown[index]),
        )

    become(0)
    _, handle = cuda_memory.allocate(1000, GPU)
    become(1)
    opened = cuda_memory.open_memory(handle)
    assert place_of(opened) == (4096, 1000, 1)
    assert driver.opened == [(1, 4096)]


def test_gpu_memory_that_cannot_be_opened_is_an_error_with_its_reason(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = cuda_memory.allocate(1000, GPU)
    elsewhere = msgspec.structs.replace(handle, device_uuid="33333333-0000")
    with pytest.raises(
        WeightSyncError,
        match="on GPU 33333333-0000, and this process sees 11111111-0000, 2",
    ):
        cuda_memory.open_memory(elsewhere)
    with pytest.raises(WeightSyncError, match="has 64 bytes, this one 3"):
        cuda_memory.open_memory(msgspec.structs.replace(handle, ipc_handle=b"abc"))
    driver.status = 400
    with pytest.raises(
        WeightSyncError,
        match=r"cuIpcOpenMemHandle_v2 .*CUDA_ERROR_INVALID_HANDLE \(400\)",
    ):
        cuda_memory.open_memory(handle)
    with pytest.raises(
        WeightSyncError, match=r"GPU 0 gives no .*cuMemAlloc_v2 failed.*device cpu"
    ):
        cuda_memory.allocate(1000, GPU)

    def no_driver() -> ctypes.CDLL:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_memory, "_driver", no_driver)
    with pytest.raises(WeightSyncError, match="the CUDA driver cannot be loaded"):
        cuda_memory.allocate(1000, GPU)


@pytest.fixture
def shared_memory_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_shared_memory(monkeypatch)


def stage(writer: ArenaWriter, version: int) -> StagedWeights:
    tensors = {spec.name: torch.full(spec.shape, float(version)) for spec in LAYOUT}
    return writer.stage(WeightVersion(version), tensors.items())


@pytest.mark.usefixtures("shared_memory_as_gpu")
async def test_gpu_arena_is_loaded_and_checked_like_the_cpu_arena() -> None:
    engine = LoaderEngine()
    receiver = receiver_of(engine, readback_every=2)
    writer = ArenaWriter(LAYOUT, device=GPU)
    for version in (1, 2, 3, 4):
        staged = stage(writer, version)
        await receiver.check(LAYOUT, staged)
        await load_verified(receiver, staged)
        for spec in LAYOUT:
            new = torch.full(spec.shape, float(version))
            assert torch.equal(engine.parameters[spec.name], new)
            assert staged.checksums[spec.name] == whole_checksums({"": new})[""]
    assert engine.loads == [True, False, True, False]
    handle = msgspec.json.decode(staged.handle, type=ArenaHandle)
    assert handle.cuda is not None
    assert os.stat(handle.path).st_size == 0  # its leases alone are there
    writer._slots[handle.slot]["model.norm.weight"][3] = 9.0
    with pytest.raises(ChecksumError, match=r"1 of 2 tensors .*model.norm.weight"):
        await load_verified(receiver, staged)
    engine.parameters["model.norm.weight"].fill_(4.0)
    engine.parameters[LAYOUT[1].name][3, 3] = 9.0
    held = await receiver.checksums(staged)
    assert [
        name for name, value in staged.checksums.items() if held[name] != value
    ] == [LAYOUT[1].name]


@pytest.mark.usefixtures("shared_memory_as_gpu")
async def test_engine_ranks_load_their_slices_from_a_gpu_arena() -> None:
    engine = SlicedEngine()
    receiver = ArenaReceiver("engine-0", engine, ArenaWeights(), num_ranks=4)  # type: ignore[arg-type]
    writer = ArenaWriter(SLICED_LAYOUT, device=GPU)
    staged = writer.stage(WeightVersion(1), sliced_values(1).items())
    await receiver.check(SLICED_LAYOUT, staged)
    await load_verified(receiver, staged)


@pytest.mark.usefixtures("shared_memory_as_gpu")
def test_gpu_arena_of_another_layout_is_refused() -> None:
    handle = msgspec.json.decode(
        stage(ArenaWriter(LAYOUT, device=GPU), 1).handle, type=ArenaHandle
    )
    open_arena(handle, LAYOUT)
    larger = (*LAYOUT, TensorSpec(name="d", shape=(4096,), dtype="float32"))
    with pytest.raises(LayoutError, match="not of this layout"):
        open_arena(handle, larger)
