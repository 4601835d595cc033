"""The weight arena: shared memory with two slots, written by the trainer, read by engines.

One memfd: a header (JSON: id, tensors) and two slots of equal layout. Engines open it as
`/proc/<trainer's pid>/fd/<n>` and keep it mapped, so an update moves no bytes but the copy into the
parameters, and nothing is left on the machine after kill -9 of everybody. Invariant: the slot of the
weights staged last stays whole while the next version is written into the other one; staging the
same version again (after a failed update) rewrites its own slot. Written by `train/rank.py`,
read by `rollout/weight_loader.py` inside SGLang. Imports torch only where tensors are touched."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import secrets
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights
from invrl.types import TensorSpec, WeightVersion

if TYPE_CHECKING:
    import torch

_MAGIC = b"invrlwts"
_PAGE = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHandle:
    """What goes through `StagedWeights.handle`: which arena, where, which slot."""

    path: str
    arena_id: str
    slot: int

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> ArenaHandle:
        return msgspec.json.decode(text, type=cls)


def checksum(tensor: torch.Tensor) -> str:
    """Hex xxh3-64 of the tensor's bytes, row-major."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def num_bytes(spec: TensorSpec) -> int:
    """Raises LayoutError for a dtype that no carrier moves."""
    if spec.dtype not in _ITEM_BYTES:
        raise LayoutError(f"{spec.name}: dtype {spec.dtype} is not one of {sorted(_ITEM_BYTES)}")
    return math.prod(spec.shape) * _ITEM_BYTES[spec.dtype]


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tensors: tuple[TensorSpec, ...]


class Arena:
    """A mapped arena and its layout; views of its slots are torch tensors without a copy."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        """Takes over `fd`. Raises WeightSyncError if this is no arena."""
        try:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(fd, 0, prot=access)
        except (OSError, ValueError) as error:
            raise WeightSyncError(f"the weight arena cannot be mapped: {error}") from error
        finally:
            if not writable:
                os.close(fd)
        if self._map[: len(_MAGIC)] != _MAGIC:
            raise WeightSyncError("what was opened is not a weight arena")
        (length,) = struct.unpack_from("<Q", self._map, len(_MAGIC))
        header = msgspec.json.decode(self._map[16 : 16 + length], type=_Header)
        self.id, self.tensors = header.id, header.tensors
        self._header_bytes = _rounded_up(16 + length, _PAGE)
        self._offsets, self._slot_bytes = _slot(self.tensors)

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """Hugging Face name -> tensor, in layout order, over the slot's memory."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a read-only buffer: nobody writes these views
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
        start = self._header_bytes + slot * self._slot_bytes
        views: dict[str, torch.Tensor] = {}
        for spec, offset in zip(self.tensors, self._offsets, strict=True):
            raw = whole[start + offset : start + offset + num_bytes(spec)]
            views[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
        return views


def open_arena(handle: ArenaHandle) -> Arena:
    """Map another process's arena, read-only. Raises WeightSyncError if it is gone or another one."""
    try:
        fd = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightSyncError(f"the weight arena {handle.path} cannot be opened: {error}") from error
    arena = Arena(fd, writable=False)
    if arena.id != handle.arena_id:
        raise WeightSyncError(f"{handle.path} is arena {arena.id}, not {handle.arena_id}")
    return arena


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _slot(tensors: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in a slot, and the bytes of a slot."""
    sizes = (_rounded_up(num_bytes(spec), 64) for spec in tensors)
    *offsets, end = itertools.accumulate(sizes, initial=0)
    return offsets, _rounded_up(max(end, 1), _PAGE)


def _create(tensors: Sequence[TensorSpec]) -> int:
    """A memfd with header and two empty slots."""
    text = msgspec.json.encode(_Header(id=secrets.token_hex(8), tensors=tuple(tensors)))
    fd = os.memfd_create("invrl-weights", os.MFD_CLOEXEC)
    os.ftruncate(fd, _rounded_up(16 + len(text), _PAGE) + 2 * _slot(tensors)[1])
    os.pwrite(fd, _MAGIC + struct.pack("<Q", len(text)) + text, 0)
    return fd


class ArenaWriter:
    """The trainer's end: owns the memory; it lives as long as this process keeps it."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        names = [spec.name for spec in tensors]
        if len(set(names)) != len(names):
            raise LayoutError("a tensor name occurs twice in the layout")
        self._fd = _create(tensors)
        self._arena = Arena(self._fd, writable=True)
        self._views = (self._arena.views(0), self._arena.views(1))
        self._slot = 1
        self._version: WeightVersion | None = None

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Nobody can open the arena any more; who has it mapped keeps it."""
        os.close(self._fd)

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Write all tensors of the layout, each once, any order, any device. Raises LayoutError."""
        slot = self._slot if version == self._version else 1 - self._slot
        checksums = self._write(self._views[slot], tensors)
        self._slot, self._version = slot, version
        handle = ArenaHandle(path=self.path, arena_id=self._arena.id, slot=slot).to_json()
        size = sum(map(num_bytes, self._arena.tensors))
        return StagedWeights(version=version, handle=handle, checksums=checksums, num_bytes=size)

    def _write(
        self, views: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> dict[str, str]:
        checksums: dict[str, str] = {}
        for name, tensor in tensors:
            view = views.get(name)
            if view is None or name in checksums:
                raise LayoutError(f"{name}: {'staged twice' if view is not None else 'not in the layout'}")
            if view.shape != tensor.shape or view.dtype != tensor.dtype:
                laid_out = f"{view.dtype} {tuple(view.shape)}"
                raise LayoutError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, the layout says {laid_out}")
            view.copy_(tensor.detach())
            checksums[name] = checksum(view)
        if len(checksums) != len(views):
            missing = [name for name in views if name not in checksums]
            raise LayoutError(f"{len(missing)} tensors were not staged, {missing[0]} among them")
        return checksums
