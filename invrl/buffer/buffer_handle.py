"""What others hold of the buffer: `interfaces.Buffer` over its Ray actor, with a
deadline on every call.

Can be pickled. What the actor raises keeps its type; an actor that died is a
ServerError."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from invrl.buffer.buffer_actor import BufferActor
from invrl.buffer.event_counts import BufferCounts
from invrl.buffer.failures import FailureReport
from invrl.buffer.wait_report import WaitReport
from invrl.host.actor import ActorHandle
from invrl.metrics import Metric
from invrl.types import DroppedGroup, GroupLease, Outcome, TakenBatch, WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHandle:
    actor: ActorHandle[BufferActor]
    batch_timeout_s: float
    """How long `start` and `take` may take."""
    call_timeout_s: float = 60.0
    """How long any other call may take."""
    heartbeat_timeout_s: float = 30.0

    async def start(self, snapshot: bytes | None = None) -> None:
        """Waits until the actor is up, has restored the snapshot of a checkpoint, and
        polls."""
        await self.actor.call(BufferActor.start, self.batch_timeout_s, snapshot)

    async def watch(self) -> None:
        """Once the actor has started. Never returns; raises ServerError if the actor
        does not answer."""
        await self.actor.watch(self.heartbeat_timeout_s)

    async def lease(self) -> GroupLease | None:
        return await self.actor.call(BufferActor.lease, self.call_timeout_s)

    async def record(self, outcome: Outcome) -> None:
        await self.actor.call(BufferActor.record, self.call_timeout_s, outcome)

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        return await self.actor.call(BufferActor.unwanted, self.call_timeout_s)

    async def take(self) -> TakenBatch:
        """Raises DeadlineError after `batch_timeout_s`: the actor's, which names what
        is missing, or one of the handle if the actor does not answer."""
        deadline_s = self.batch_timeout_s + self.call_timeout_s
        return await self.actor.call(BufferActor.take, deadline_s, self.batch_timeout_s)

    async def trained(self, batch_id: int) -> None:
        await self.actor.call(BufferActor.trained, self.call_timeout_s, batch_id)

    async def advance(self, version: WeightVersion) -> None:
        await self.actor.call(BufferActor.advance, self.call_timeout_s, version)

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return await self.actor.call(BufferActor.snapshot, self.call_timeout_s, trained)

    async def final_snapshot(self, trained: WeightVersion) -> bytes:
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
        await self.actor.call(BufferActor.close, self.call_timeout_s)
