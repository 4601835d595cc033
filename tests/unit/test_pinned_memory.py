"""Host memory that is pinned for a GPU. The driver is replaced."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from invrl.types.weights import TensorSpec
from invrl.weights.transports.arena import map_arena
from invrl.weights.transports.pinned_memory import pin

LAYOUT = (TensorSpec(name="a.weight", shape=(16,), dtype="float32"),)


class Driver:
    """CUDA's runtime."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.status = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.status == 0:
            self.pinned[address] = num_bytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_memory_is_pinned_until_its_last_tensor_is_gone(driver: Driver) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    view = memory[10:20].view(torch.float16)
    pin(memory)
    assert driver.pinned == {memory.data_ptr(): 100}
    del memory
    gc.collect()
    assert driver.pinned
    del view
    gc.collect()
    assert driver.pinned == {}


def test_memory_that_the_driver_refuses_to_pin_stays_pageable(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.status = 304
    memory = torch.zeros(100, dtype=torch.uint8)
    pin(memory)
    assert "CUDA error 304" in caplog.text
    del memory
    gc.collect()


def test_process_with_a_gpu_pins_the_arena_and_sees_later_writes(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private mapping would not: pinning copies its pages."""
    path = str(tmp_path / "arena")
    writer = map_arena(path, LAYOUT, writable=True)
    assert driver.pinned == {}
    is_shared: list[bool] = []
    from_file = torch.from_file

    def recorded(path: str, *, shared: bool, **options):
        is_shared.append(shared)
        return from_file(path, shared=shared, **options)

    monkeypatch.setattr(torch, "from_file", recorded)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    reader = map_arena(path, LAYOUT)
    assert is_shared == [True]
    assert list(driver.pinned.values()) == [2 * 64]
    writer[1]["a.weight"].fill_(3)
    assert reader[1]["a.weight"].tolist() == 16 * [3]
