"""The weight arena: shared memory with two slots, written by the trainer, read by engines.

One memfd, named by the arena's id: two slots of equal layout. Engines open it as
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

_PAGE = 4096
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaHandle:
    """What goes through `StagedWeights.handle`: which arena, where, laid out how, which slot."""

    path: str
    arena_id: str
    slot: int
    tensors: tuple[TensorSpec, ...] = ()

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


class Arena:
    """A mapped arena and its layout; views of its slots are torch tensors without a copy."""

    def __init__(self, fd: int, tensors: Sequence[TensorSpec], *, writable: bool) -> None:
        self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self.tensors = tuple(tensors)
        self._offsets, self._slot_bytes = _slot(self.tensors)

    def views(self, slot: int) -> dict[str, torch.Tensor]:
        """Hugging Face name -> tensor, in layout order, over the slot's memory."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a read-only buffer: nobody writes these views
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
        start = slot * self._slot_bytes
        views: dict[str, torch.Tensor] = {}
        for spec, offset in zip(self.tensors, self._offsets, strict=True):
            raw = whole[start + offset : start + offset + num_bytes(spec)]
            views[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
        return views


def open_arena(handle: ArenaHandle) -> Arena:
    """Map another process's arena, read-only. Raises WeightSyncError if it is gone or another one."""
    try:
        if handle.arena_id not in (found := os.readlink(handle.path)):
            raise WeightSyncError(f"{handle.path} is {found}, not {handle.arena_id}")
        fd = os.open(handle.path, os.O_RDONLY)
        try:
            return Arena(fd, handle.tensors, writable=False)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WeightSyncError(f"the weight arena {handle.path} cannot be opened: {error}") from error


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _slot(tensors: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor begins in a slot, and the bytes of a slot."""
    sizes = (_rounded_up(num_bytes(spec), 64) for spec in tensors)
    *offsets, end = itertools.accumulate(sizes, initial=0)
    return offsets, _rounded_up(max(end, 1), _PAGE)


class ArenaWriter:
    """The trainer's end: owns the memory; it lives as long as this process keeps it."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        names = [spec.name for spec in tensors]
        if len(set(names)) != len(names):
            raise LayoutError("a tensor name occurs twice in the layout")
        self._id = f"invrl-weights-{secrets.token_hex(8)}"
        self._fd = os.memfd_create(self._id, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 2 * _slot(tensors)[1])
        self._arena = Arena(self._fd, tensors, writable=True)
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
        laid_out = self._arena.tensors
        handle = ArenaHandle(path=self.path, arena_id=self._id, slot=slot, tensors=laid_out).to_json()
        size = sum(map(num_bytes, laid_out))
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
