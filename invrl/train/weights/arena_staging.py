"""Staging in the arena: the ranks that hold one copy of the model write a slot
together, each its own part of each tensor, directly from its parameters.

    first rank: takes the slot ──► all: write their parts ──► all: hash a share of the
    tensors ──► first rank

No weight is sent from rank to rank, and hashing is also shared. A rank only needs
memory for the part of one parameter in the engines' dtype, and for a copy of that if it
must be split (`split`).

Invariant: nothing is hashed before every rank has written, and a tensor of which a part
is missing is an error. The ranks exchange the location of the slot, the amounts
written, and checksums. If one fails, the others wait until the trainer ends them, as in
all collective calls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from invrl.errors import LayoutError
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.checksums.checksums import HashTensors, tensor_checksums
from invrl.weights.tensors.tensor_slice import TensorPart
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter, open_arena

if TYPE_CHECKING:
    from invrl.weights.transports.arena import Slot


@lru_cache(maxsize=1)
def _slots(arena: ArenaHandle, layout: WeightLayout) -> Sequence[Slot]:
    """Map the slots of an arena, given its first one. They stay mapped."""
    return open_arena(arena, layout, writable=True)


def write_parts(slot: Slot, parts: Iterable[TensorPart]) -> dict[str, int]:
    """Write the parts and return the number of written elements of each tensor. Keeps
    no part. A GPU may still copy. Raises LayoutError."""
    written: Counter[str] = Counter()
    for part in parts:
        tensor = slot.get(part.name)
        if tensor is None:
            raise LayoutError(f"{part.name}: not in the layout")
        place = tensor
        if tensor.dim():
            length = part.values.shape[part.dimension]
            if part.start + length > tensor.shape[part.dimension]:
                raise LayoutError(
                    f"{part.name}: a part ends beyond its {tuple(tensor.shape)}"
                )
            place = tensor.narrow(part.dimension, part.start, length)
        if place.shape != part.values.shape or place.dtype != part.values.dtype:
            given = f"{part.values.dtype} {tuple(part.values.shape)}"
            raise LayoutError(
                f"{part.name}: {given} is no part of {tensor.dtype} {tuple(tensor.shape)}"
            )
        place.copy_(part.values, non_blocking=True)
        written[part.name] += part.values.numel()
    return dict(written)


def check_covered(layout: WeightLayout, written: Iterable[Mapping[str, int]]) -> None:
    """Raise LayoutError unless all elements of each tensor were written."""
    total: Counter[str] = Counter()
    for of_rank in written:
        total.update(of_rank)
    for spec in layout:
        size = math.prod(spec.shape)
        if total[spec.name] != size:
            raise LayoutError(
                f"{spec.name}: the ranks wrote {total[spec.name]} of its {size} elements"
            )


def shares(layout: WeightLayout, count: int) -> list[list[str]]:
    """Return the tensors that each of `count` ranks hashes: about equally many
    bytes."""
    names: list[list[str]] = [[] for _ in range(count)]
    sizes = [0] * count
    for spec in sorted(layout, key=num_bytes, reverse=True):
        smallest = sizes.index(min(sizes))
        names[smallest].append(spec.name)
        sizes[smallest] += num_bytes(spec)
    return names


def stage_first(
    writer: ArenaWriter,
    version: WeightVersion,
    layout: WeightLayout,
    parts: Iterable[TensorPart],
    others: Sequence[int],
) -> StagedWeights:
    """Stage on the rank that owns the arena. `others` are the ranks that call
    `stage_other` meanwhile."""
    with writer.writing(version) as (place, slot):
        for rank in others:
            _send(place, rank)
        written = [write_parts(slot, parts)]
        _wait_for_copies(slot)  # other ranks hash what this one has written
        written += [_receive(rank) for rank in others]
        check_covered(layout, written)
        own_share, *other_shares = shares(layout, 1 + len(others))
        for rank, share in zip(others, other_shares, strict=True):
            _send(share, rank)
        checksums = tensor_checksums(
            {name: slot[name] for name in own_share}, writer.hash_tensors
        )
        for rank in others:
            checksums |= _receive(rank)
    return writer.staged(version, place, checksums)


def stage_other(
    layout: WeightLayout,
    parts: Iterable[TensorPart],
    first: int,
    hash_tensors: HashTensors,
) -> None:
    """Stage on every other rank of the copy. `first` is the rank that owns the
    arena."""
    place: ArenaHandle = _receive(first)
    slot = _slots(place.at(0), layout)[place.slot]
    written = write_parts(slot, parts)
    _wait_for_copies(slot)
    _send(written, first)
    share: list[str] = _receive(first)
    _send(tensor_checksums({name: slot[name] for name in share}, hash_tensors), first)


def _wait_for_copies(slot: Slot) -> None:
    """Wait for this rank's GPU, and for that of the slot if it is another one."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        for gpu in {tensor.device for tensor in slot.values() if tensor.is_cuda}:
            torch.cuda.synchronize(gpu)


def _send(value: object, rank: int) -> None:
    import torch.distributed

    torch.distributed.send_object_list([value], rank)


def _receive(rank: int) -> Any:
    import torch.distributed

    received: list[Any] = [None]
    torch.distributed.recv_object_list(received, rank)
    return received[0]
