"""Sends one version of the weights from the trainer to several engines together: the
weight transport `collective`.

One trainer rank and the scheduler processes of the engines form a separate gloo process
group. The slot of an arena is sent through it in buckets: while one bucket is copied
into an engine's parameters, the next one is under way.

    trainer's slot (`slot_layout.py`)   | bucket 0 | bucket 1 | ...      two are under way at a time
                                            │ broadcast
    each engine                         buffer 0, buffer 1 ──► the rows of its parameters

Invariant: every wait ends within the bucket's deadline, whatever happens to the other
members. A group is not used again after any failure. The members find each other in a
store that listens only on the trainer's address, uses names that no stranger can guess,
and admits nobody once the group is complete.

An engine keeps its group for the next update, and leaves it when it is invited to
another. GPU bytes go through host memory. Imports torch only where tensors are touched.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from invrl.errors import BroadcastError, LayoutError
from invrl.host.network.rendezvous import interface_towards, join_store
from invrl.interfaces import WeightLayout
from invrl.types.weights import TensorSpec
from invrl.weights.tensors.tensor_spec import num_bytes
from invrl.weights.transports.slot_layout import slot_layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

BUCKET_BYTES = 16 << 20
_UNDER_WAY = 2
"""Buckets in flight at a time; an engine has as many buffers."""
TRAINER = 0
"""Rank that sends."""


class GroupInvitation(msgspec.Struct, frozen=True, kw_only=True):
    """Handle with which one engine joins a group, as JSON."""

    host: str
    port: int
    """Port on which the store listens until the group is complete."""
    key: str
    """Random name of the group, and prefix of every name in its store."""
    rank: int
    world_size: int
    timeout_s: float
    """Timeout for the members to join, and then for each bucket."""


class WeightGroup:
    """One process's membership of a group. Close a member that has raised
    BroadcastError."""

    def __init__(self, invitation: GroupInvitation, store: Store) -> None:
        """Wait for all members. Raises BroadcastError."""
        from torch._C._distributed_c10d import PrefixStore
        from torch.distributed import ProcessGroupGloo as Gloo  # pyright: ignore[reportPrivateImportUsage]

        self.key = invitation.key
        self._timeout = timedelta(seconds=invitation.timeout_s)
        options = Gloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout = self._timeout
        with _broadcast_errors("the group did not come about"):
            interface = interface_towards(invitation.host)
            options._devices = [Gloo.create_device(interface=interface)]
            names = PrefixStore(invitation.key, store)
            self._group: Any = Gloo(
                names, invitation.rank, invitation.world_size, options
            )

    def send(self, memory: torch.Tensor) -> None:
        """Send a slot's bytes, as the trainer. Returns when this process has nothing
        more to send. Raises BroadcastError."""
        under_way: deque[Any] = deque()
        with _broadcast_errors("a bucket was not sent"):
            for start in range(0, memory.numel(), BUCKET_BYTES):
                under_way.append(self._begin(memory[start : start + BUCKET_BYTES]))
                if len(under_way) == _UNDER_WAY:
                    under_way.popleft().wait()
            for work in under_way:
                work.wait()

    def receive(self, total_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the slot's bytes, bucket by bucket. A bucket is valid until the next is
        requested. Raises BroadcastError."""
        import torch

        buffers = [
            torch.empty(BUCKET_BYTES, dtype=torch.uint8) for _ in range(_UNDER_WAY)
        ]
        under_way: deque[tuple[Any, torch.Tensor]] = deque()
        for index, start in enumerate(range(0, total_bytes, BUCKET_BYTES)):
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

    def _begin(self, bucket: torch.Tensor) -> Any:
        return self._group.broadcast(bucket, TRAINER, self._timeout)


def _received(work: Any, bucket: torch.Tensor) -> torch.Tensor:
    with _broadcast_errors("a bucket was not received"):
        work.wait()
    return bucket


@contextlib.contextmanager
def _broadcast_errors(what: str) -> Iterator[None]:
    """Raise torch's and the operating system's errors as BroadcastError."""
    try:
        yield
    except (
        RuntimeError,
        OSError,
    ) as error:  # torch.distributed's errors are RuntimeErrors
        raise BroadcastError(f"{what}: {error}") from error


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor that lie in one bucket."""

    name: str
    tensor_start: int
    bucket_start: int
    num_bytes: int


def bucket_pieces(layout: WeightLayout) -> list[list[Piece]]:
    """Return the pieces in each bucket of a slot, in the order of their bytes. Padding
    is left out."""
    sizes = slot_layout(layout)
    buckets: list[list[Piece]] = [[] for _ in range(0, sizes.num_bytes, BUCKET_BYTES)]
    for spec in sorted(layout, key=lambda spec: sizes.offsets[spec.name]):
        tensor_bytes = num_bytes(spec)
        start = 0
        while start < tensor_bytes:
            index, bucket_start = divmod(sizes.offsets[spec.name] + start, BUCKET_BYTES)
            length = min(tensor_bytes - start, BUCKET_BYTES - bucket_start)
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
    try:
        group = _join(invitation)
        buckets = group.receive(slot_layout(layout).num_bytes)
        for bucket, pieces in zip(buckets, bucket_pieces(layout), strict=True):
            for piece in pieces:
                end = piece.tensor_start + piece.num_bytes
                received = bucket[
                    piece.bucket_start : piece.bucket_start + piece.num_bytes
                ]
                raw_places[piece.name][piece.tensor_start : end].copy_(received)
    except Exception:
        _leave()
        raise


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


def _join(invitation: GroupInvitation) -> WeightGroup:
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
        _joined = WeightGroup(invitation, store)
    return _joined


def _leave() -> None:
    global _joined
    if _joined is not None:
        _joined.close()
        _joined = None
