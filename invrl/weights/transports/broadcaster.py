"""The trainer's end of the weight transport `collective`: stages versions and sends
them to engines.

A version is staged in the trainer's own arena (`arena.py`), so the previous version
stays whole in the other slot. A broadcast of that slot lets engines go back to it and
joining_engines load it while the trainer computes. The trainer's host memory holds two
copies of the weights, the engines' none. NCCL sends each bucket from the trainer's GPU,
so nothing but buckets is on it.

Invariant: a group has exactly the engines that were named, sends one version at a time,
and is not used again after a failure. A slot is not overwritten while it is sent.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from invrl.errors import WeightSyncError
from invrl.host.network.rendezvous import (
    listen,
    refuse_new_connections,
    refuse_unknown_connections,
    serve_store,
)
from invrl.host.processes.process import random_key
from invrl.interfaces import StagedWeights, WeightLayout
from invrl.types.weights import WeightVersion
from invrl.weights.transports.arena import ArenaHandle, ArenaWriter
from invrl.weights.transports.broadcast import GroupInvitation, WeightGroup
from invrl.weights.transports.broadcast_groups import TRAINER
from invrl.weights.transports.pinned_memory import pin
from invrl.weights.transports.slot_layout import slot_layout
from invrl.weights.transports.slot_lease import SlotLease

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
_BROADCASTS = 8
"""Concurrent broadcasts. One that hangs ends at its bucket's deadline."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Generation:
    """A group of certain engines, from its invitations on."""

    members: tuple[str, ...]
    listener: socket.socket | None
    """Socket that members connect to, until all have connected."""
    invitations: list[GroupInvitation]
    device: torch.device
    """Device from which the trainer sends."""
    group: WeightGroup | None = None
    is_free: bool = False
    """Whether the group is complete and idle."""

    def completed(self) -> WeightGroup:
        """Wait for the members, the first time. Raises BroadcastError, or TrainError if
        a stranger connected."""
        if self.group is not None:
            return self.group
        assert self.listener is not None, "it has been closed"
        invitation = self.invitations[TRAINER]
        timeout = timedelta(seconds=invitation.timeout_s)
        store = serve_store(
            self.listener, world_size=invitation.world_size, timeout=timeout
        )
        engines = [member.partition("/")[0] for member in self.members]
        self.group = WeightGroup(invitation, store, self.device, engines)
        refuse_new_connections(self.listener)
        refuse_unknown_connections(self.listener, members=invitation.world_size)
        self.listener.close()
        self.listener = None
        return self.group

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        if self.listener is not None:
            self.listener.close()
            self.listener = None


class Broadcaster:
    """Stages and offers versions. Call it from one thread; broadcasts run in their own
    threads."""

    def __init__(
        self,
        layout: WeightLayout,
        *,
        host: str,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        """`host`: address of this machine that engines can reach. `timeout_s`: for each
        bucket. `device`: GPU from which NCCL sends to the engines', which have others;
        None: gloo sends from the host's memory."""
        self._host = host
        self._timeout_s = timeout_s
        self._device = device
        self._slot_bytes = slot_layout(layout).num_bytes
        self._arena = ArenaWriter(layout)
        self._memory: torch.Tensor | None = None
        """Memory of both slots. None until something is staged."""
        self._slots: dict[WeightVersion, ArenaHandle] = {}
        self._generations: list[_Generation] = []
        """Groups that have not failed. An engine uses only its newest one."""
        self._lock = threading.Lock()
        """Guards the list of generations."""
        self._threads = ThreadPoolExecutor(_BROADCASTS, "broadcast")

    def stage(
        self, version: WeightVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> StagedWeights:
        """Stage a version as `ArenaWriter.stage` does."""
        import torch

        staged = self._arena.stage(version, tensors)
        handle = msgspec.json.decode(staged.handle, type=ArenaHandle)
        others = {
            other: slot
            for other, slot in self._slots.items()
            if slot.slot != handle.slot
        }
        self._slots = {**others, version: handle}
        if self._memory is None:
            pins = self._device is not None
            self._memory = torch.from_file(
                handle.path,
                shared=pins,
                size=2 * self._slot_bytes,
                dtype=torch.uint8,
            )
            if pins:
                pin(self._memory)
        return staged

    def offer(self, version: WeightVersion, engines: Sequence[str]) -> list[str]:
        """Begin to send this version to these engines, each named uniquely by process.
        Returns the handle that each loads with; all must load at the same time.

        Does not wait. Later failures appear in the engines' loads.
        """
        members = tuple(engines)
        with self._lock:
            generation = self._free_generation(members)
            if generation is None:
                self._end_free_generations(members)
                generation = self._begin_generation(members)
                self._generations.append(generation)
            generation.is_free = False
        self._threads.submit(self._send, generation, version)
        return [
            msgspec.json.encode(invitation).decode()
            for invitation in generation.invitations[TRAINER + 1 :]
        ]

    def _begin_generation(self, members: tuple[str, ...]) -> _Generation:
        import torch

        listener = listen(self._host)
        key = random_key()
        invitations: list[GroupInvitation] = []
        for rank in range(len(members) + 1):
            invitation = GroupInvitation(
                host=self._host,
                port=listener.getsockname()[1],
                key=key,
                rank=rank,
                world_size=len(members) + 1,
                backend="gloo" if self._device is None else "nccl",
                timeout_s=self._timeout_s,
            )
            invitations.append(invitation)
        return _Generation(
            members=members,
            listener=listener,
            invitations=invitations,
            device=self._device or torch.device("cpu"),
        )

    def _free_generation(self, members: tuple[str, ...]) -> _Generation | None:
        for generation in self._generations:
            if generation.is_free and generation.members == members:
                return generation
        return None

    def _end_free_generations(self, members: tuple[str, ...]) -> None:
        """Close the free groups of these engines, which are about to leave them."""
        for generation in list(self._generations):
            if generation.is_free and not set(members).isdisjoint(generation.members):
                self._generations.remove(generation)
                generation.close()

    def _send(self, generation: _Generation, version: WeightVersion) -> None:
        try:
            slot = self._slots.get(version)
            if slot is None or self._memory is None:
                raise WeightSyncError(f"version {version} is not staged any more")
            with SlotLease(slot.path, slot.slot, writes=False):
                start = slot.slot * self._slot_bytes
                generation.completed().send(
                    self._memory[start : start + self._slot_bytes]
                )
            generation.is_free = True
        except Exception as error:
            names = ", ".join(generation.members)
            _LOG.warning(
                "the broadcast of version %s to %s failed: %s", version, names, error
            )
            with self._lock:
                self._generations.remove(generation)
            generation.close()
