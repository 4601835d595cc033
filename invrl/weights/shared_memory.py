"""The weight arena: shared memory with two slots, written by the trainer, read by engines.

One memfd of two slots of equal layout. Engines map it as `/proc/<trainer's pid>/fd/<n>` and keep it mapped,
so an update moves no bytes but the copy into the parameters, and nothing is left on the machine after
kill -9 of everybody. Invariant: the slot of the weights staged last stays whole while the next version
is written into the other one; staging the same version again (after a failed update) rewrites its own slot.
The engines prove by checksum that what they read is what was written. Imports torch only where tensors are
touched."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types import TensorSpec, WeightVersion

if TYPE_CHECKING:
    import torch

_ALIGNED = 64
"""Bytes; every tensor begins at a multiple."""


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What goes through `StagedWeights.handle`, as JSON: which arena, which slot."""

    path: str
    inode: int
    slot: int

    def check(self) -> None:
        """WeightSyncError if it is gone, or another one stands in its place."""
        try:
            there = os.stat(self.path).st_ino
        except OSError as error:
            raise WeightSyncError(f"the weight arena {self.path} cannot be opened: {error}") from error
        if there != self.inode:
            raise WeightSyncError(f"the weight arena {self.path} is another one")


def checksum(tensor: torch.Tensor) -> str:
    """Hex xxh3-64 of the tensor's bytes, row-major."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_hexdigest(flat.numpy().data)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def num_bytes(spec: TensorSpec) -> int:
    import torch

    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def map_arena(
    path: str, layout: WeightLayout, *, writable: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Each slot's tensors by name, in layout order, over the arena's memory. A writable one becomes as large
    as the layout needs; for a reader torch raises RuntimeError if it is gone or smaller."""
    import torch

    sizes = (-(-num_bytes(spec) // _ALIGNED) * _ALIGNED for spec in layout)
    *offsets, slot_bytes = itertools.accumulate(sizes, initial=0)
    whole = torch.from_file(path, shared=writable, size=2 * slot_bytes, dtype=torch.uint8)

    def slot(start: int) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        for at, spec in zip(offsets, layout, strict=True):
            raw = whole[start + at :][: num_bytes(spec)]
            views[spec.name] = raw.view(getattr(torch, spec.dtype)).view(spec.shape)
        return views

    return slot(0), slot(slot_bytes)


class ArenaWriter:
    """The trainer's end: owns the memory; it lives as long as this process keeps it."""

    def __init__(self, layout: WeightLayout) -> None:
        if len({spec.name for spec in layout}) != len(layout):
            raise LayoutError("a tensor name occurs twice in the layout")
        self._path = f"/proc/{os.getpid()}/fd/{os.memfd_create('invrl-weights')}"
        self._slots = map_arena(self._path, layout, writable=True)
        self._slot = 1
        self._version: WeightVersion | None = None

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Write all tensors of the layout, each once, any order, any device. Raises LayoutError."""
        slot = self._slot if version == self._version else 1 - self._slot
        views, checksums = self._slots[slot], dict[str, str]()
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
        self._slot, self._version = slot, version
        place = ArenaHandle(path=self._path, inode=os.stat(self._path).st_ino, slot=slot)
        handle = msgspec.json.encode(place).decode()
        size = sum(view.nbytes for view in views.values())
        return StagedWeights(version=version, handle=handle, checksums=checksums, num_bytes=size)
