"""What others hold of the buffer: `interfaces.Buffer` over the Ray actor, every call with a deadline.
Picklable; made by `cluster.py`, used by the loop and the dispatcher. What the actor raises keeps its type;
an actor that died is a ServerError."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from invrl.errors import DeadlineError, ServerError
from invrl.metrics import Metric
from invrl.types import FailedRollout, GroupLease, RolloutSummary, TakenBatch, WeightVersion

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferHandle:
    """`actor` is the Ray handle of a `BufferActor` (Ray's handles have no types of their own)."""

    actor: Any
    batch_timeout_s: float
    call_timeout_s: float = 60.0

    async def start(self, snapshot: bytes | None = None) -> None:
        """Wait until the actor lives, has restored the snapshot of a checkpoint, and polls."""
        await self._call("start", self.actor.start.remote(snapshot), self.batch_timeout_s)

    async def snapshot(self, trained: WeightVersion) -> bytes:
        return await self._call("snapshot", self.actor.snapshot.remote(trained))

    async def lease(self) -> GroupLease | None:
        return await self._call("lease", self.actor.lease.remote())

    async def record(self, outcome: RolloutSummary | FailedRollout) -> None:
        await self._call("record", self.actor.record.remote(outcome))

    async def take(self) -> TakenBatch:
        """DeadlineError after batch_timeout_s, raised by the actor, which knows what is missing; here only
        if the actor itself does not answer."""
        reply = self.actor.take.remote(self.batch_timeout_s)
        return await self._call("take", reply, self.batch_timeout_s + self.call_timeout_s)

    async def trained(self, batch_id: int) -> None:
        await self._call("trained", self.actor.trained.remote(batch_id))

    async def discard(self, batch_id: int) -> None:
        await self._call("discard", self.actor.discard.remote(batch_id))

    async def advance(self, version: WeightVersion) -> None:
        await self._call("advance", self.actor.advance.remote(version))

    async def release(self, version: WeightVersion) -> None:
        await self._call("release", self.actor.release.remote(version))

    async def metrics(self) -> Mapping[str, Metric]:
        return await self._call("metrics", self.actor.metrics.remote())

    async def close(self) -> Mapping[str, Metric]:
        """End the run: everything untrained is dropped. The last metrics."""
        return await self._call("close", self.actor.close.remote())

    async def _call(self, name: str, reply: Awaitable[Reply], timeout_s: float | None = None) -> Reply:
        timeout_s = self.call_timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"the buffer actor to answer {name}()", time.monotonic() - start) from error
        except RayActorError as error:
            raise ServerError(f"the buffer actor died before it answered {name}(): {error}") from error
