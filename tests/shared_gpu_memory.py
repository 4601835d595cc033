"""Shared memory in the place of a GPU's, for tests of the weight arena without a GPU:
the path of the memory is its handle."""

from __future__ import annotations

import os

import pytest
import torch

from invrl.weights.transports import arena
from invrl.weights.transports.cuda_memory import CudaHandle

GPU = torch.device("cuda", 0)


def use_shared_memory(monkeypatch: pytest.MonkeyPatch) -> list[CudaHandle]:
    """Let the arena allocate and open shared memory. Returns the handles that are
    opened from now on."""
    opened: list[CudaHandle] = []

    def open_memory(handle: CudaHandle) -> torch.Tensor:
        opened.append(handle)
        return _mapped(handle)

    monkeypatch.setattr(arena, "allocate", _allocate)
    monkeypatch.setattr(arena, "open_memory", open_memory)
    return opened


def _allocate(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, CudaHandle]:
    assert device == GPU
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('invrl-test')}"
    handle = CudaHandle(
        device_uuid="x", num_bytes=num_bytes, offset=0, ipc_handle=path.encode()
    )
    return _mapped(handle), handle


def _mapped(handle: CudaHandle) -> torch.Tensor:
    return torch.from_file(
        handle.ipc_handle.decode(),
        shared=True,
        size=handle.num_bytes,
        dtype=torch.uint8,
    )
