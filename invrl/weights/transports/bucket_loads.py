"""Loads of the weight transport `bucket` while the trainer holds the version on its GPU.

    for each bucket:  the trainer gathers it ──► every engine loads it ──► the next one

Engines that load at the same time take the same buckets. One that fails has a mix of
two versions, as after any load that failed: its load fails, and the others go on. When
the trainer no longer holds the version, because it trains again or because an engine
goes back to the version before, engines load what is staged in the host's memory, from
the beginning and again bucket by bucket.

Invariant: the trainer is asked for a bucket when all engines have replied to the one
before, whichever of the loads it was for.
"""

from __future__ import annotations

import asyncio
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

    async def bucket(self, index: int, copies: int) -> list[str]:
        """Return a bucket of the trainer's parameters, serialised for each of its
        readers. It lives until the next call."""
        ...


class BucketLoads(JointLoads):
    def __init__(self, source: BucketSource, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._source = source
        self._bucket_in_use = asyncio.Lock()
        """Held from the request for a bucket of the trainer to the last reply to it."""

    async def _run(self, version: WeightVersion, loads: Sequence[EngineLoad]) -> None:
        handle = msgspec.json.decode(loads[0].staged.handle, type=BucketHandle)
        if not handle.trainer_has_more or not await self._load_held(
            version, loads, len(handle.payloads)
        ):
            await self._load_staged(loads, handle.payloads)
        for load in _continuing(loads):
            load.succeed()

    async def _load_held(
        self, version: WeightVersion, loads: Sequence[EngineLoad], num_buckets: int
    ) -> bool:
        """Load the trainer's parameters. False if it stopped holding the version."""
        for index in range(num_buckets):
            async with self._bucket_in_use:
                loads = _continuing(loads)
                if not loads:
                    return True
                if not self._source.holds(version):
                    return False
                payloads = await self._source.bucket(index, len(loads))
                await self._load_bucket(loads, payloads, index, num_buckets)
        return True

    async def _load_staged(
        self, loads: Sequence[EngineLoad], payloads: Sequence[str]
    ) -> None:
        """Load what is in the host's memory."""
        for index, payload in enumerate(payloads):
            loads = _continuing(loads)
            copies = [payload] * len(loads)
            await self._load_bucket(loads, copies, index, len(payloads))

    async def _load_bucket(
        self,
        loads: Sequence[EngineLoad],
        payloads: Sequence[str],
        index: int,
        num_buckets: int,
    ) -> None:
        """Load a bucket into every engine, each from its payload."""
        handles: list[str] = []
        for payload in payloads:
            bucket = BucketHandle(
                payloads=[payload], begins=index == 0, ends=index == num_buckets - 1
            )
            handles.append(msgspec.json.encode(bucket).decode())
        async for load, error in self._replies(loads, handles):
            if error is not None:
                load.fail(error)


def _continuing(loads: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the loads that nobody has ended: a deadline of the caller cancels one."""
    return [load for load in loads if not load.done.done()]
