"""GPU memory that one process allocates and others open by a handle: CUDA IPC.

A handle is 64 bytes of the driver, which travel as base64 in JSON, with the GPU's UUID:
processes may number the GPUs differently. The memory comes from the driver, not from
torch's cache, so the handle points to its beginning and nothing else lies in it. The
allocating process must outlive its use by others. A process that opened the memory
closes it with the last tensor over it, so an engine that gets a new trainer does not
keep the old one's memory. The driver frees it when all of these processes have ended,
however they end.

Imports torch only where it is used.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import WeightSyncError

if TYPE_CHECKING:
    import torch

_HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Handle by which another process finds the memory."""

    device_uuid: str
    num_bytes: int
    offset: int
    """Bytes from the beginning of the opened memory."""
    ipc_handle: bytes


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, passed to the driver by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class _DeviceBytes:
    """Memory at an address, in a form that torch accepts: a tensor made of it shares
    the memory, and its storage keeps this object alive."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def allocate(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, CudaHandle]:
    """Allocate memory that is freed with this process. Raises WeightSyncError."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # makes the device's context this thread's
        torch.cuda.empty_cache()  # the driver cannot use what torch caches
        address = ctypes.c_uint64()
        try:
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        except WeightSyncError as error:
            fix = "use --weights.arena-device cpu, or leave engines less of the GPU's memory"
            reason = f"GPU {index} gives no {num_bytes / 1e9:.2f} GB to the weight arena: {error}; {fix}"
            raise WeightSyncError(reason) from error
        ipc_handle = _IpcHandle()
        _call("cuIpcGetMemHandle", ctypes.byref(ipc_handle), address)
    handle = CudaHandle(
        device_uuid=_device_uuids()[index],
        num_bytes=num_bytes,
        offset=0,
        ipc_handle=bytes(ipc_handle.reserved),
    )
    return _tensor_over(_DeviceBytes(address.value, num_bytes), index), handle


def open_memory(handle: CudaHandle) -> torch.Tensor:
    """Open another process's memory as bytes. It stays open as long as a tensor over it
    exists.

    Raises WeightSyncError if this process does not see that GPU, or if the memory is
    gone.
    """
    import torch

    uuids = _device_uuids()
    if handle.device_uuid not in uuids:
        seen = ", ".join(uuids) or "none"
        reason = (
            f"its memory is on GPU {handle.device_uuid}, and this process sees {seen}"
        )
        raise WeightSyncError(f"the weight arena cannot be opened: {reason}")
    if len(handle.ipc_handle) != _HANDLE_BYTES:
        reason = f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, this one {len(handle.ipc_handle)}"
        raise WeightSyncError(f"the weight arena cannot be opened: {reason}")
    index = uuids.index(handle.device_uuid)
    with torch.cuda.device(index):
        torch.cuda.synchronize()
        address = ctypes.c_uint64()
        ipc_handle = _IpcHandle.from_buffer_copy(handle.ipc_handle)
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            ipc_handle,
            ctypes.c_uint(_ENABLE_PEER_ACCESS),
        )
    memory = _DeviceBytes(address.value + handle.offset, handle.num_bytes)
    # the driver closes it then
    weakref.finalize(memory, _close, address.value, index).atexit = False
    return _tensor_over(memory, index)


def _close(address: int, device_index: int) -> None:
    """Close the memory. Any thread may call it, whenever the last tensor is gone."""
    import torch

    with torch.cuda.device(device_index):
        torch.cuda.synchronize()  # no kernel may still read it
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _device_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that this process sees, by number. NVIDIA's tools,
    unlike torch, prefix them with "GPU-"."""
    import torch

    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    return [uuid.removeprefix("GPU-") for uuid in uuids]


def _tensor_over(memory: _DeviceBytes, device_index: int) -> torch.Tensor:
    import torch

    return torch.as_tensor(memory, device=torch.device("cuda", device_index))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    """Call the driver. Raises WeightSyncError with the driver's name for the error."""
    try:
        driver = _driver()
    except OSError as error:
        raise WeightSyncError(f"the CUDA driver cannot be loaded: {error}") from error
    status = getattr(driver, function)(*arguments)
    if status != 0:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(status, ctypes.byref(name))
        reason = (name.value or b"an unknown error").decode()
        raise WeightSyncError(f"{function} failed: {reason} ({status})")
