"""The weight transport `arena`: shared memory with two slots, which the trainer writes and the engines read.

The arena is one memfd with two slots of equal layout. Engines map it as `/proc/<trainer's pid>/fd/<n>` and
keep it mapped. So an update moves no bytes except for the copy into the engine's parameters, and nothing is
left on the machine after kill -9 of every process.

Invariant: the slot of the weights staged last stays whole while the next version is written into the other
slot. Staging the same version again (after a failed update) rewrites its own slot. No slot is written while
an engine reads it (`slot_lease.py`), whether it copies or its parameters point there. Checksums are taken of
the slot's bytes while they are written; the engines prove by them that what they read is what was written.
Imports torch only where tensors are touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types import WeightVersion
from invrl.weights.slot_layout import slot_layout
from invrl.weights.slot_lease import SlotLease
from invrl.weights.tensor_spec import copy_hashed, num_bytes

if TYPE_CHECKING:
    import torch

    Slot = dict[str, torch.Tensor]
    """Tensors by name, over the arena's memory."""

_SLOT_FREE_WITHIN_S = 60.0
"""An engine that was lost may read its slot until its process has ended."""


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Which arena and which slot: the content of `StagedWeights.handle`, as JSON."""

    path: str
    inode: int
    slot: int

    def check(self) -> None:
        """Raises WeightSyncError if the arena is gone, or if another one has its path."""
        try:
            inode = os.stat(self.path).st_ino
        except OSError as error:
            raise WeightSyncError(f"the weight arena {self.path} cannot be opened: {error}") from error
        if inode != self.inode:
            raise WeightSyncError(f"the weight arena {self.path} is another one")


def map_arena(path: str, layout: WeightLayout, *, writable: bool = False) -> tuple[Slot, Slot]:
    """Map the arena's memory. Returns both slots; their tensors are in layout order.

    A writable arena becomes as large as the layout needs. For a reader torch raises RuntimeError if the arena
    is gone or too small.
    """
    import torch

    sizes = slot_layout(layout)
    memory = torch.from_file(path, shared=writable, size=2 * sizes.num_bytes, dtype=torch.uint8)

    def slot(slot_start: int) -> Slot:
        views: Slot = {}
        for spec in layout:
            start = slot_start + sizes.offsets[spec.name]
            raw_bytes = memory[start : start + num_bytes(spec)]
            dtype: torch.dtype = getattr(torch, spec.dtype)
            views[spec.name] = raw_bytes.view(dtype).view(spec.shape)
        return views

    return slot(0), slot(sizes.num_bytes)


class ArenaWriter:
    """The trainer's end. It owns the memory, which lives as long as this process keeps the writer."""

    def __init__(self, layout: WeightLayout) -> None:
        descriptor = os.memfd_create("invrl-weights")
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._slots = map_arena(self._path, layout, writable=True)
        self._slot = 1
        self._version: WeightVersion | None = None

    def stage(self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Write each tensor of the layout once, in any order, from any device. Waits for engines that read
        the slot. Raises LayoutError, and WeightSyncError if an engine reads the slot for too long."""
        slot = 1 - self._slot
        if version == self._version:  # a failed update is tried again
            slot = self._slot
        views = self._slots[slot]
        with SlotLease(self._path, slot, writes=True, wait_s=_SLOT_FREE_WITHIN_S):
            checksums = _write(tensors, views)
        missing = [name for name in views if name not in checksums]
        if missing:
            raise LayoutError(f"{len(missing)} tensors were not staged, {missing[0]} among them")
        self._slot = slot
        self._version = version
        inode = os.stat(self._path).st_ino
        handle = ArenaHandle(path=self._path, inode=inode, slot=slot)
        return StagedWeights(
            version=version,
            handle=msgspec.json.encode(handle).decode(),
            checksums=checksums,
            num_bytes=sum(view.nbytes for view in views.values()),
        )


def _write(tensors: Iterable[tuple[str, torch.Tensor]], views: Slot) -> dict[str, str]:
    """Writes each tensor to its place in the slot. Returns checksums of the places. Raises LayoutError."""
    checksums: dict[str, str] = {}
    for name, tensor in tensors:
        view = views.get(name)
        if view is None:
            raise LayoutError(f"{name}: not in the layout")
        if name in checksums:
            raise LayoutError(f"{name}: staged twice")
        if view.shape != tensor.shape or view.dtype != tensor.dtype:
            staged = f"{tensor.dtype} {tuple(tensor.shape)}"
            wanted = f"{view.dtype} {tuple(view.shape)}"
            raise LayoutError(f"{name}: {staged}, the layout says {wanted}")
        checksums[name] = copy_hashed(view, tensor)
    return checksums
