"""The weight transport `arena`: shared memory with two slots, which the trainer writes
and the engines read.

The arena is one memfd with two slots of equal layout. Engines map it as
`/proc/<trainer's pid>/fd/<n>` and keep it mapped. An update therefore moves no bytes
except for the copy into the engine's parameters, and nothing is left on the machine
after kill -9 of every process. Its size is sealed: reading past a truncated end would
kill the reader. On a GPU the slots are CUDA memory that engines open once
(`cuda_memory.py`), and the memfd is empty: it only carries the leases of the slots.

Invariant: the slot of the weights staged last stays whole while the next version is
written into the other slot. Staging the same version again (after a failed update)
rewrites its own slot. No slot is written while an engine reads it (`slot_lease.py`),
whether it copies or its parameters point there. Checksums are taken of the slot's bytes
while they are written; engines use them to prove that they read what was written.
Imports torch only where tensors are touched.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from invrl.errors import LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.checksums.checksums import (
    HashTensors,
    copy_all,
    tensor_checksums,
    whole_hash,
    xxh3_checksums,
)
from invrl.weights.checksums.multilinear_checksum import SumsInPlace
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.cuda_memory import CudaHandle, allocate, open_memory
from invrl.weights.transports.pinned_memory import pin
from invrl.weights.transports.slot_layout import slot_layout
from invrl.weights.transports.slot_lease import SlotLease

if TYPE_CHECKING:
    import torch

    Slot = dict[str, torch.Tensor]
    """Tensors by name, as views of the arena's memory."""

_SLOT_FREE_WITHIN_S = 60.0
"""Seconds to wait for a free slot: a lost engine may read it until its process has
ended."""


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """An arena and one of its slots: the content of `StagedWeights.handle`, as JSON."""

    path: str
    inode: int
    slot: int
    cuda: CudaHandle | None = None
    """GPU memory of the slots. None: they are in the file at `path`."""

    def at(self, slot: int) -> ArenaHandle:
        """Return the handle of another slot of this arena."""
        return structs.replace(self, slot=slot)

    def check(self) -> None:
        """Raise WeightSyncError if the arena is gone or its path belongs to another
        one."""
        try:
            inode = os.stat(self.path).st_ino
        except OSError as error:
            raise WeightSyncError(
                f"the weight arena {self.path} cannot be opened: {error}"
            ) from error
        if inode != self.inode:
            raise WeightSyncError(f"the weight arena {self.path} is another one")


def map_arena(
    path: str, layout: WeightLayout, *, writable: bool = False
) -> tuple[Slot, Slot]:
    """Map the arena's memory, pinned in a process that uses a GPU. Returns both slots;
    their tensors are in layout order.

    A writable arena becomes as large as the layout needs. For a reader torch raises
    RuntimeError if the arena is gone or too small.
    """
    import torch

    size = _arena_bytes(layout)
    uses_gpu = torch.cuda.is_initialized()
    # Pages of a mapping that is not shared become copies when they are pinned.
    shared = writable or uses_gpu
    memory = torch.from_file(path, shared=shared, size=size, dtype=torch.uint8)
    if uses_gpu:
        pin(memory)
    return _slot_tensors(memory, layout)


def open_arena(
    arena: ArenaHandle, layout: WeightLayout, *, writable: bool = False
) -> tuple[Slot, Slot]:
    """Map an arena of another process. Raises WeightSyncError if it is gone, is another
    arena, or is on a GPU that this process does not see; LayoutError if its size is not
    that of the layout."""
    arena.check()
    if arena.cuda is None:
        return map_arena(arena.path, layout, writable=writable)
    if arena.cuda.num_bytes != _arena_bytes(layout):
        reason = f"it has {arena.cuda.num_bytes} bytes, the layout takes {_arena_bytes(layout)}"
        raise LayoutError(f"the weight arena is not of this layout: {reason}")
    return _slot_tensors(open_memory(arena.cuda), layout)


def _arena_bytes(layout: WeightLayout) -> int:
    return 2 * slot_layout(layout).num_bytes


def _slot_tensors(memory: torch.Tensor, layout: WeightLayout) -> tuple[Slot, Slot]:
    import torch

    sizes = slot_layout(layout)

    def slot(slot_start: int) -> Slot:
        views: Slot = {}
        for spec in layout:
            start = slot_start + sizes.offsets[spec.name]
            raw_bytes = memory[start : start + num_bytes(spec)]
            dtype: torch.dtype = getattr(torch, spec.dtype)
            views[spec.name] = raw_bytes.view(dtype).view(spec.shape)
        return views

    return slot(0), slot(sizes.num_bytes)


@lru_cache(maxsize=1)
def _mapped(first_slot: ArenaHandle, layout: WeightLayout) -> tuple[Slot, Slot]:
    """Return the slots of an arena and keep it mapped: faulting in a fresh mapping
    takes longer than the copy."""
    import torch

    # SGLang calls its loader in inference mode. A parameter that pointed at a tensor of
    # that mode could not be written outside of it.
    with torch.inference_mode(mode=False):
        return open_arena(first_slot, layout)


def mapped_slot(arena: ArenaHandle, layout: WeightLayout) -> Slot:
    """Map a slot for reading under a `SlotLease`. Raises as `open_arena` does."""
    return _mapped(arena.at(0), layout)[arena.slot]  # both slots share one mapping


def hash_slot(arena: ArenaHandle, layout: WeightLayout) -> dict[str, str]:
    """Return the checksums of a slot in host memory. Raises WeightSyncError if the
    arena is gone or the slot is being written."""
    slot = mapped_slot(arena, layout)
    with SlotLease(arena.path, arena.slot, writes=False):
        return tensor_checksums(slot, xxh3_checksums)


class ArenaWriter:
    """Trainer's end of the arena. It owns the memory, which lives as long as this
    writer."""

    def __init__(
        self,
        layout: WeightLayout,
        *,
        checksums_add_up: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`checksums_add_up`: for engines of several ranks, which hash slices
        (`multilinear_checksum.py`). In a process that uses a GPU they always add up.
        `device`: GPU whose memory holds the slots; None for host memory."""
        import torch

        # Engines have GPUs if this process has one, and hash their parameters there.
        uses_gpu = torch.cuda.is_initialized() or device is not None
        self._checksums_add_up = checksums_add_up or uses_gpu
        self.hash_tensors = whole_hash(adds_up=self._checksums_add_up)
        descriptor = os.memfd_create(
            "invrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        self._path = f"/proc/{os.getpid()}/fd/{descriptor}"
        self._cuda: CudaHandle | None = None
        if device is None:
            self._slots = map_arena(self._path, layout, writable=True)
            fcntl.fcntl(
                descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            )
        else:
            memory, self._cuda = allocate(_arena_bytes(layout), device)
            self._slots = _slot_tensors(memory, layout)
        self._slot_hashes: list[HashTensors] = [self.hash_tensors, self.hash_tensors]
        """Hash of each whole slot."""
        if self._checksums_add_up:
            self._slot_hashes = [
                SumsInPlace.of_wholes(slot).whole_checksums for slot in self._slots
            ]
        self._slot = 1
        self._version: WeightVersion | None = None

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Write each tensor of the layout once, in any order, from any device. Waits
        for engines that read the slot. Raises LayoutError, and WeightSyncError if an
        engine holds the slot for too long."""
        with self.writing(version) as (place, slot):
            hash_tensors = self._slot_hashes[place.slot]
            checksums = copy_all(slot, placed(tensors, slot), hash_tensors)
        return self.staged(version, place, checksums)

    @contextmanager
    def writing(self, version: WeightVersion) -> Iterator[tuple[ArenaHandle, Slot]]:
        """Yield the slot of this version for writing and hashing, also by others that
        open it. `staged` follows. Waits and raises WeightSyncError as `stage` does."""
        number = 1 - self._slot
        if version == self._version:  # a failed update is tried again
            number = self._slot
        inode = os.stat(self._path).st_ino
        handle = ArenaHandle(path=self._path, inode=inode, slot=number, cuda=self._cuda)
        with SlotLease(self._path, number, writes=True, wait_s=_SLOT_FREE_WITHIN_S):
            yield handle, self._slots[number]

    def staged(
        self, version: WeightVersion, handle: ArenaHandle, checksums: Mapping[str, str]
    ) -> StagedWeights:
        """Describe what was written under `writing`. Raises LayoutError if a tensor is
        missing."""
        slot = self._slots[handle.slot]
        missing = [name for name in slot if name not in checksums]
        if missing:
            raise LayoutError(
                f"{len(missing)} tensors were not staged, {missing[0]} among them"
            )
        self._slot = handle.slot
        self._version = version
        return StagedWeights(
            version=version,
            handle=msgspec.json.encode(handle).decode(),
            checksums=checksums,
            checksums_add_up=self._checksums_add_up,
            num_bytes=sum(view.nbytes for view in slot.values()),
        )


def placed(
    tensors: Iterable[tuple[str, torch.Tensor]], views: Slot
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the same tensors. Raises LayoutError for a tensor that has no place in the
    slot or was yielded before."""
    names: set[str] = set()
    for name, tensor in tensors:
        view = views.get(name)
        if view is None:
            raise LayoutError(f"{name}: not in the layout")
        if name in names:
            raise LayoutError(f"{name}: staged twice")
        if view.shape != tensor.shape or view.dtype != tensor.dtype:
            staged = f"{tensor.dtype} {tuple(tensor.shape)}"
            wanted = f"{view.dtype} {tuple(view.shape)}"
            raise LayoutError(f"{name}: {staged}, the layout says {wanted}")
        names.add(name)
        yield name, tensor
