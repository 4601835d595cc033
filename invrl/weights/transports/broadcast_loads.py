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
it, they are tried together again. An engine that is silent for longer than a bucket's
timeout, counted from another one's reply, is given up.

Invariant: every load ends. Does not import torch, and sends an engine nothing but its
own `load`. Use from one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary

from invrl.errors import BroadcastError, DeadlineError
from invrl.interfaces import StagedWeights, WeightReceiver
from invrl.types.weights import WeightVersion

logger = logging.getLogger(__name__)
_ANSWER_S = 5.0
"""Seconds for an engine's reply to arrive after its last wait has ended."""


class BroadcastSource(Protocol):
    """The sending trainer."""

    async def offer(
        self, version: WeightVersion, engines: Sequence[str]
    ) -> Sequence[str]: ...


@dataclass(slots=True, eq=False)
class _Load:
    receiver: WeightReceiver
    staged: StagedWeights
    done: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def succeed(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class BroadcastLoads:
    """`load` loads one engine. `timeout_s` bounds each wait inside a broadcast."""

    def __init__(self, source: BroadcastSource, *, timeout_s: float) -> None:
        self._source = source
        self._timeout_s = timeout_s
        self._numbers = count()
        self._names: WeakKeyDictionary[WeightReceiver, str] = WeakKeyDictionary()
        self._gathered: dict[WeightVersion, list[_Load]] = {}
        """Loads that have begun and have no broadcast yet."""
        self._broadcasts: set[asyncio.Task[None]] = set()
        self._given_up: set[asyncio.Task[None]] = set()
        """Cancelled calls of engines that did not reply; nobody waits for them."""

    async def load(self, receiver: WeightReceiver, staged: StagedWeights) -> None:
        """Load one engine. Raises what its `load` raises, or DeadlineError if it does
        not reply although another engine of its broadcast has."""
        load = _Load(receiver, staged)
        version = staged.version
        if version not in self._gathered:
            self._gathered[version] = []
            # Begins when everything scheduled in this turn of the event loop has run.
            broadcast = asyncio.create_task(self._broadcast(version))
            self._broadcasts.add(broadcast)
            broadcast.add_done_callback(self._broadcasts.discard)
        self._gathered[version].append(load)
        await load.done

    async def _broadcast(self, version: WeightVersion) -> None:
        loads = self._gathered.pop(version)
        has_been_repeated = False
        try:
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
        except Exception as error:
            for load in loads:
                load.fail(error)

    async def _try(self, version: WeightVersion, loads: Sequence[_Load]) -> list[_Load]:
        """Run one broadcast. Completes the loads that succeeded or failed, and returns
        those for which it broke."""
        handles = await self._source.offer(
            version, [self._name(load.receiver) for load in loads]
        )
        calls: dict[asyncio.Task[None], _Load] = {}
        for load, handle in zip(loads, handles, strict=True):
            call = asyncio.create_task(
                load.receiver.load(replace(load.staged, handle=handle))
            )
            load.done.add_done_callback(lambda _, call=call: call.cancel())
            calls[call] = load
        broken: list[_Load] = []
        pending = set(calls)
        timeout_s = None  # the caller limits the whole transfer
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._give_up({call: calls[call] for call in pending})
                break
            timeout_s = self._timeout_s + _ANSWER_S
            for call in done:
                error = (
                    asyncio.CancelledError() if call.cancelled() else call.exception()
                )
                if error is None:
                    calls[call].succeed()
                elif isinstance(error, BroadcastError):
                    broken.append(calls[call])
                else:
                    calls[call].fail(error)
        # in order: it identifies the group
        return [load for load in loads if load in broken]

    def _give_up(self, silent: dict[asyncio.Task[None], _Load]) -> None:
        for call, load in silent.items():
            self._given_up.add(call)
            call.add_done_callback(self._forget)
            waited_for = f"{load.receiver.name} to answer, as the other engines of its broadcast did"
            load.fail(DeadlineError(waited_for, self._timeout_s + _ANSWER_S))

    def _forget(self, call: asyncio.Task[None]) -> None:
        self._given_up.discard(call)
        if not call.cancelled():
            call.exception()  # nobody else takes it, and asyncio would complain of that

    def _name(self, receiver: WeightReceiver) -> str:
        """Return the engine's name: a restarted engine's receiver is a new object under
        the same name."""
        if receiver not in self._names:
            self._names[receiver] = f"{receiver.name}/{next(self._numbers)}"
        return self._names[receiver]
