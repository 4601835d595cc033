"""The buffer as other processes hold it: `interfaces.Buffer` over its Ray actor, with a
deadline on every call.

Picklable. Exceptions of the actor keep their type; an actor that died is a ServerError.
While the run's disk is full, a call that writes the ledger waits for space.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from invrl.buffer.failures import FailureReport
from invrl.buffer.groups.event_counts import BufferCounts
from invrl.buffer.groups.wait_report import WaitReport
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.errors import DiskFullError
from invrl.host.files.disk_waits import until_written
from invrl.host.ray.actor import ActorHandle
from invrl.types.batches import TakenBatch
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease
from invrl.types.metrics import Metric
from invrl.types.rollouts import Outcome
from invrl.types.weights import WeightVersion

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHandle:
    actor: ActorHandle[BufferActor]
    batch_timeout_s: float
    """Deadline of `start` and `take`."""
    call_timeout_s: float = 60.0
    """Deadline of any other call."""
    heartbeat_timeout_s: float = 30.0
    folder: Path = Path()
    """Folder of the run's store."""

    async def start(self, snapshot: bytes | None = None) -> None:
        """Wait until the actor is up, has restored the snapshot of a checkpoint, and
        polls."""
        await self.actor.call(BufferActor.start, self.batch_timeout_s, snapshot)

    async def watch(self) -> None:
        """Watch the actor after its start. Never returns; raises ServerError if the
        actor does not answer."""
        await self.actor.watch(self.heartbeat_timeout_s)

    async def lease(self) -> GroupLease | None:
        return await self.actor.call(BufferActor.lease, self.call_timeout_s)

    async def record(self, outcome: Outcome) -> None:
        await self.actor.call(BufferActor.record, self.call_timeout_s, outcome)

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        return await self.actor.call(BufferActor.unwanted, self.call_timeout_s)

    async def take(self) -> TakenBatch:
        """Take a batch. Raises DeadlineError after `batch_timeout_s`: the actor's,
        which names what is missing, or the handle's if the actor does not answer."""
        deadline_s = self.batch_timeout_s + self.call_timeout_s
        return await self.actor.call(BufferActor.take, deadline_s, self.batch_timeout_s)

    async def trained(self, batch_id: int) -> None:
        try:
            await self.actor.call(BufferActor.trained, self.call_timeout_s, batch_id)
        except DiskFullError:  # it has noted the batch
            await self._until_written(self._write_ledger)

    async def advance(self, version: WeightVersion) -> None:
        await self.actor.call(BufferActor.advance, self.call_timeout_s, version)

    async def snapshot(self, trained: WeightVersion) -> bytes:
        """Return the buffer's state, waiting while the disk is full."""

        async def take() -> bytes:
            return await self.actor.call(
                BufferActor.snapshot, self.call_timeout_s, trained
            )

        return await self._until_written(take)

    async def final_snapshot(self, trained: WeightVersion) -> bytes:
        """Return the buffer's state, or raise DiskFullError instead of waiting: the run
        is ending."""
        return await self.actor.call(
            BufferActor.final_snapshot, self.call_timeout_s, trained
        )

    async def metrics(self) -> Mapping[str, Metric]:
        return await self.actor.call(BufferActor.metrics, self.call_timeout_s)

    async def counts(self) -> BufferCounts:
        return await self.actor.call(BufferActor.counts, self.call_timeout_s)

    async def failures(self) -> FailureReport:
        return await self.actor.call(BufferActor.failures, self.call_timeout_s)

    async def waiting(self) -> WaitReport:
        return await self.actor.call(BufferActor.waiting, self.call_timeout_s)

    async def close(self) -> None:
        async def end() -> None:
            await self.actor.call(BufferActor.close, self.call_timeout_s)

        await self._until_written(end)

    async def _write_ledger(self) -> None:
        await self.actor.call(BufferActor.write_ledger, self.call_timeout_s)

    async def _until_written(self, work: Callable[[], Awaitable[T]]) -> T:
        return await until_written(self.folder, "the buffer's ledger", work)
