"""Sends one version of the weights from the trainer to several engines together: the
weight transport `collective`.

One trainer rank and the scheduler processes of the engines form a separate process
group (`broadcast_groups.py`). The slot of an arena is sent through it in buckets, in
the order of its bytes: while one bucket is copied into an engine's parameters, the next
one is under way.

    trainer's slot (`slot_layout.py`)   | bucket 0 | bucket 1 | ...      two are under way at a time
                                            │ broadcast
    each engine                         buffer 0, buffer 1 ──► the rows of its parameters

Invariant: every wait ends within the bucket's deadline, whatever happens to the other
members. A group is not used again after any failure. The members find each other in a
store that listens only on the trainer's address, uses names that no stranger can guess,
and admits nobody once the group is complete.

An engine keeps its group for the next update, and leaves it when it is invited to
another. Imports torch only where tensors are touched.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import msgspec

from invrl.errors import BroadcastError, LayoutError
from invrl.host.network.rendezvous import join_store
from invrl.interfaces import WeightLayout
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.broadcast_groups import (
    TRAINER,
    BroadcastGroup,
    GlooGroup,
    NcclGroup,
    Work,
)
from invrl.weights.transports.slot_layout import slot_layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

BUCKET_BYTES = {"gloo": 16 << 20, "nccl": 128 << 20}
_UNDER_WAY = 2
"""Buckets in flight at a time; an engine has as many buffers."""


class GroupInvitation(msgspec.Struct, frozen=True, kw_only=True):
    """Handle with which one engine joins a group, as JSON."""

    host: str
    port: int
    """Port on which the store listens until the group is complete."""
    key: str
    """Random name of the group, and prefix of every name in its store."""
    rank: int
    world_size: int
    backend: Literal["gloo", "nccl"] = "gloo"
    """NCCL sends from the trainer's GPU to the engines'."""
    timeout_s: float
    """Timeout for the members to join, and then for each bucket."""


class WeightGroup:
    """One process's membership of a group. Close a member that has raised
    BroadcastError."""

    def __init__(
        self,
        invitation: GroupInvitation,
        store: Store,
        device: torch.device,
        members: Sequence[str] = (),
    ) -> None:
        """Wait for all members. `device`: of the weights in this process. `members`:
        engines by rank, on the trainer. Raises BroadcastError, which names the engines
        that have not come."""
        from torch._C._distributed_c10d import PrefixStore

        self.key = invitation.key
        self._bucket_bytes = BUCKET_BYTES[invitation.backend]
        names = PrefixStore(invitation.key, store)
        with _broadcast_errors("the group did not come about"):
            names.set(_arrival(invitation.rank), "")
            _wait_for_members(names, members, invitation.timeout_s)
            self._group = _make_group(invitation, names, device)

    def send(self, memory: torch.Tensor) -> None:
        """Send a slot's bytes, as the trainer. Returns when this process has nothing
        more to send. Raises BroadcastError."""
        under_way: deque[tuple[Work, torch.Tensor]] = deque()
        with _broadcast_errors("a bucket was not sent"):
            for start in range(0, memory.numel(), self._bucket_bytes):
                bucket = self._group.to_send(memory[start : start + self._bucket_bytes])
                under_way.append((self._begin(bucket), bucket))
                if len(under_way) == _UNDER_WAY:
                    under_way.popleft()[0].wait()
            for work, _ in under_way:
                work.wait()

    def receive(self, total_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the slot's bytes, bucket by bucket. A bucket is valid until the next is
        requested. Raises BroadcastError."""
        buffers = [self._group.buffer(self._bucket_bytes) for _ in range(_UNDER_WAY)]
        under_way: deque[tuple[Work, torch.Tensor]] = deque()
        for index, start in enumerate(range(0, total_bytes, self._bucket_bytes)):
            bucket = buffers[index % _UNDER_WAY][: total_bytes - start]
            with _broadcast_errors("a bucket was not received"):
                under_way.append((self._begin(bucket), bucket))
            if len(under_way) == _UNDER_WAY:
                yield _received(*under_way.popleft())
        while under_way:
            yield _received(*under_way.popleft())

    def close(self) -> None:
        """Leave the group. The other members' waits fail."""
        self._group.abort()

    def _begin(self, bucket: torch.Tensor) -> Work:
        return self._group.broadcast(bucket)


def _make_group(
    invitation: GroupInvitation, store: Store, device: torch.device
) -> BroadcastGroup:
    """Join the group of the invitation's backend. Raises torch's errors."""
    timeout = timedelta(seconds=invitation.timeout_s)
    rank = invitation.rank
    size = invitation.world_size
    if invitation.backend == "nccl":
        return NcclGroup(store, rank, size, device=device, timeout=timeout)
    return GlooGroup(store, rank, size, host=invitation.host, timeout=timeout)


def _arrival(rank: int) -> str:
    """Return the name in the store by which a member says that it has come."""
    return f"rank {rank} is here"


def _wait_for_members(store: Store, members: Sequence[str], timeout_s: float) -> None:
    """Raise BroadcastError with the names of the members that do not come in time."""
    ends_at = time.monotonic() + timeout_s
    absent: list[str] = []
    for rank, member in enumerate(members, TRAINER + 1):
        left_s = max(0.001, ends_at - time.monotonic())
        try:
            store.wait([_arrival(rank)], timedelta(seconds=left_s))
        except RuntimeError:  # torch.distributed's errors are RuntimeErrors
            absent.append(member)
    if absent:
        names = ", ".join(absent)
        raise BroadcastError(f"{names} did not come within {timeout_s:g} s")


def _received(work: Work, bucket: torch.Tensor) -> torch.Tensor:
    with _broadcast_errors("a bucket was not received"):
        work.wait()
    return bucket


@contextlib.contextmanager
def _broadcast_errors(what: str) -> Iterator[None]:
    """Raise torch's and the operating system's errors as BroadcastError."""
    try:
        yield
    # torch.distributed's errors are RuntimeErrors
    except (BroadcastError, RuntimeError, OSError) as error:
        raise BroadcastError(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that lie in one bucket."""

    name: str
    tensor_start: int
    bucket_start: int
    num_bytes: int


def bucket_pieces(layout: WeightLayout, bucket_bytes: int) -> list[list[Piece]]:
    """Return the pieces in each bucket of a slot, in the order of their bytes. Padding
    is left out."""
    sizes = slot_layout(layout)
    buckets: list[list[Piece]] = [[] for _ in range(0, sizes.num_bytes, bucket_bytes)]
    for spec in sorted(layout, key=lambda spec: sizes.offsets[spec.name]):
        tensor_bytes = num_bytes(spec)
        start = 0
        while start < tensor_bytes:
            index, bucket_start = divmod(sizes.offsets[spec.name] + start, bucket_bytes)
            length = min(tensor_bytes - start, bucket_bytes - bucket_start)
            buckets[index].append(Piece(spec.name, start, bucket_start, length))
            start += length
    return buckets


_joined: WeightGroup | None = None
"""Group that this engine is in."""


def receive_weights(
    invitation: GroupInvitation,
    layout: WeightLayout,
    places: Mapping[str, torch.Tensor],
) -> None:
    """Receive every tensor of the layout into its place, in an engine.

    Raises LayoutError before anything is written, and BroadcastError, after which the
    places may hold a mix.
    """
    raw_places = _raw_places(layout, places)
    device = next(iter(raw_places.values())).device
    _check_device(invitation, device)
    all_pieces = bucket_pieces(layout, BUCKET_BYTES[invitation.backend])
    try:
        group = _join(invitation, device)
        buckets = group.receive(slot_layout(layout).num_bytes)
        for bucket, pieces in zip(buckets, all_pieces, strict=True):
            for piece in pieces:
                end = piece.tensor_start + piece.num_bytes
                received = bucket[
                    piece.bucket_start : piece.bucket_start + piece.num_bytes
                ]
                raw_places[piece.name][piece.tensor_start : end].copy_(received)
    except Exception:
        _leave()
        raise


def _check_device(invitation: GroupInvitation, device: torch.device) -> None:
    if invitation.backend == "nccl" and device.type != "cuda":
        raise LayoutError("the trainer sends to GPUs, and the engine is on a CPU")


def _raw_places(
    layout: Sequence[TensorSpec], places: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    import torch

    for spec in layout:
        if not places[spec.name].is_contiguous():
            raise LayoutError(
                f"{spec.name}: the engine does not hold it in one piece of memory"
            )
    return {spec.name: places[spec.name].view(-1).view(torch.uint8) for spec in layout}


def _join(invitation: GroupInvitation, device: torch.device) -> WeightGroup:
    """Return the invitation's group: the one that this engine is in, or a new one."""
    global _joined
    if _joined is None or _joined.key != invitation.key:
        _leave()
        with _broadcast_errors("the trainer's store was not reached"):
            store = join_store(
                invitation.host,
                invitation.port,
                world_size=invitation.world_size,
                timeout=timedelta(seconds=invitation.timeout_s),
            )
        _joined = WeightGroup(invitation, store, device)
    return _joined


def _leave() -> None:
    global _joined
    if _joined is not None:
        _joined.close()
        _joined = None
