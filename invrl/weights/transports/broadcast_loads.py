"""Loads of the weight transport `collective`: engines that load at the same time share
one broadcast.

    loads that begin together ──► offer ──► every engine of the broadcast loads
                                    ▲            │
                                    │            ├── has loaded ──────────────────────► done
                                    │            ├── failed by itself, or is silent ──► that load fails
                                    └────────────┴── says that the broadcast broke

A broadcast breaks for all of its engines when one of them dies or hangs. Engines that
report this are alive and were held up by another. They get the version in a new group,
without the engines that did not reply or failed by themselves. If all engines report
it, they are tried together again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary

from invrl.errors import BroadcastError
from invrl.interfaces import WeightReceiver
from invrl.types.weights import WeightVersion
from invrl.weights.transports.joint_loads import EngineLoad, JointLoads

logger = logging.getLogger(__name__)


class BroadcastSource(Protocol):
    """The sending trainer."""

    async def offer(
        self, version: WeightVersion, engines: Sequence[str]
    ) -> Sequence[str]: ...


class BroadcastLoads(JointLoads):
    """`timeout_s` bounds each wait inside a broadcast."""

    def __init__(self, source: BroadcastSource, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._source = source
        self._numbers = count()
        self._names: WeakKeyDictionary[WeightReceiver, str] = WeakKeyDictionary()

    async def _run(self, version: WeightVersion, loads: Sequence[EngineLoad]) -> None:
        has_been_repeated = False
        while loads:
            broken = await self._try(version, loads)
            if len(broken) == len(loads):
                if has_been_repeated:
                    break
                has_been_repeated = True
            if broken:
                names = ", ".join(load.receiver.name for load in broken)
                logger.warning(
                    "the broadcast of version %s begins again, with %s",
                    version,
                    names,
                )
            loads = [load for load in broken if not load.done.done()]
        for load in loads:
            load.fail(BroadcastError("the broadcast broke twice for every engine"))

    async def _try(
        self, version: WeightVersion, loads: Sequence[EngineLoad]
    ) -> list[EngineLoad]:
        """Run one broadcast. Completes the loads that succeeded or failed, and returns
        those for which it broke."""
        handles = await self._source.offer(
            version, [self._name(load.receiver) for load in loads]
        )
        broken: list[EngineLoad] = []
        async for load, error in self._replies(loads, handles):
            if error is None:
                load.succeed()
            elif isinstance(error, BroadcastError):
                broken.append(load)
            else:
                load.fail(error)
        # in order: it identifies the group
        return [load for load in loads if load in broken]

    def _name(self, receiver: WeightReceiver) -> str:
        """Return the engine's name: a restarted engine's receiver is a new object under
        the same name."""
        if receiver not in self._names:
            self._names[receiver] = f"{receiver.name}/{next(self._numbers)}"
        return self._names[receiver]
