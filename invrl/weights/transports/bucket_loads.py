"""Loads of the weight transport `bucket` while the trainer holds the version on its GPU.

    for each bucket:  the trainer gathers it ──► every engine loads it ──► the next one

Engines that load at the same time take the same buckets. One that fails has a mix of
two versions, as after any load that failed: its load fails, and the others go on. When
the trainer no longer holds the version, because it trains again or because an engine
goes back to the version before, engines load what is staged in the host's memory, from
the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from invrl.types.weights import WeightVersion
from invrl.weights.transports.buckets import BucketHandle
from invrl.weights.transports.joint_loads import EngineLoad, JointLoads


class BucketSource(Protocol):
    """The trainer."""

    def holds(self, version: WeightVersion) -> bool:
        """Whether a bucket that is asked for now is of this version."""
        ...

    async def bucket(self, index: int) -> str:
        """Return a bucket of the trainer's parameters, serialised. It lives until the
        next call."""
        ...


class BucketLoads(JointLoads):
    def __init__(self, source: BucketSource, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._source = source

    async def _run(self, version: WeightVersion, loads: Sequence[EngineLoad]) -> None:
        handle = msgspec.json.decode(loads[0].staged.handle, type=BucketHandle)
        count = len(handle.payloads)
        for index in range(count):
            if not handle.trainer_has_more or not self._source.holds(version):
                await self._load_staged(_continuing(loads))
                return
            bucket = BucketHandle(
                payloads=[await self._source.bucket(index)],
                begins=index == 0,
                ends=index == count - 1,
            )
            loads = await self._load_bucket(_continuing(loads), bucket)
            if not loads:
                return
        for load in loads:
            load.succeed()

    async def _load_bucket(
        self, loads: Sequence[EngineLoad], bucket: BucketHandle
    ) -> list[EngineLoad]:
        """Load a bucket into every engine. Returns the loads that continue."""
        handle = msgspec.json.encode(bucket).decode()
        loaded: list[EngineLoad] = []
        async for load, error in self._replies(loads, [handle] * len(loads)):
            if error is None:
                loaded.append(load)
            else:
                load.fail(error)
        return loaded

    async def _load_staged(self, loads: Sequence[EngineLoad]) -> None:
        """Load the whole version from the host's memory."""
        handles = [load.staged.handle for load in loads]
        async for load, error in self._replies(loads, handles):
            if error is None:
                load.succeed()
            else:
                load.fail(error)


def _continuing(loads: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the loads that nobody has ended: a deadline of the caller cancels one."""
    return [load for load in loads if not load.done.done()]
