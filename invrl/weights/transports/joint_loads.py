"""Loads of a weight version that begin at the same time and share their work.

Engines of one update call `load` in the same turn of the event loop. They are loaded
together. An engine that is silent for longer than a timeout, counted from another one's
reply, is given up, so that it does not hold up the rest.

Invariant: every load ends. Does not import torch, and sends an engine nothing but its
own `load`. Use from one event loop.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from invrl.errors import DeadlineError
from invrl.interfaces import StagedWeights, WeightReceiver
from invrl.types.weights import WeightVersion

_ANSWER_S = 5.0
"""Seconds for an engine's reply to arrive after its last wait has ended."""


@dataclass(slots=True, eq=False)
class EngineLoad:
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


class JointLoads(ABC):
    """`load` loads one engine. `timeout_s` bounds the silence of an engine after
    another one's reply."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._gathered: dict[WeightVersion, list[EngineLoad]] = {}
        """Loads that have begun and are not run yet."""
        self._running: set[asyncio.Task[None]] = set()
        self._given_up: set[asyncio.Task[None]] = set()
        """Cancelled calls of engines that did not reply; nobody waits for them."""

    async def load(self, receiver: WeightReceiver, staged: StagedWeights) -> None:
        """Load one engine. Raises what its `load` raises, or DeadlineError if it does
        not reply although another engine of its group has."""
        load = EngineLoad(receiver, staged)
        version = staged.version
        if version not in self._gathered:
            self._gathered[version] = []
            # Begins when everything scheduled in this turn of the event loop has run.
            running = asyncio.create_task(self._run_gathered(version))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
        self._gathered[version].append(load)
        await load.done

    async def _run_gathered(self, version: WeightVersion) -> None:
        loads = self._gathered.pop(version)
        try:
            await self._run(version, loads)
        except Exception as error:
            for load in loads:
                load.fail(error)

    @abstractmethod
    async def _run(self, version: WeightVersion, loads: Sequence[EngineLoad]) -> None:
        """Load these engines, and end each of the loads."""

    async def _replies(
        self, loads: Sequence[EngineLoad], handles: Sequence[str]
    ) -> AsyncIterator[tuple[EngineLoad, BaseException | None]]:
        """Let each engine load what its handle names. Yields each load with its error,
        or None, when the engine replies. The load of an engine that is silent fails,
        and is left out."""
        calls: dict[asyncio.Task[None], EngineLoad] = {}
        for load, handle in zip(loads, handles, strict=True):
            call = asyncio.create_task(
                load.receiver.load(replace(load.staged, handle=handle))
            )
            load.done.add_done_callback(lambda _, call=call: call.cancel())
            calls[call] = load
        pending = set(calls)
        timeout_s = None  # the caller limits the whole transfer
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self._give_up({call: calls[call] for call in pending})
                return
            timeout_s = self._timeout_s + _ANSWER_S
            for call in done:
                error = (
                    asyncio.CancelledError() if call.cancelled() else call.exception()
                )
                yield calls[call], error

    def _give_up(self, silent: Mapping[asyncio.Task[None], EngineLoad]) -> None:
        for call, load in silent.items():
            self._given_up.add(call)
            call.add_done_callback(self._forget)
            waited_for = (
                f"{load.receiver.name} to answer, as the engines that load with it did"
            )
            load.fail(DeadlineError(waited_for, self._timeout_s + _ANSWER_S))

    def _forget(self, call: asyncio.Task[None]) -> None:
        self._given_up.discard(call)
        if not call.cancelled():
            call.exception()  # nobody else takes it, and asyncio would complain of that
