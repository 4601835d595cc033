"""Engines that come back while updates continue: the version they read, and the moment
they join the fleet.

A joining_engine loads the version that the fleet holds, in the background. Meanwhile an
update may stage the next version, which goes to other memory, and commit it. Then the
joining_engine must load again. During this second load updates still stage, but wait
for it before they list their engines.

    loads the fleet's version ──► between two updates: holds the fleet's version? ── yes ─► joins
      ▲                                                  │ no
      └────────── once more, and updates wait ◄──────────┘

Invariants: memory is not overwritten while a joining engine reads it. A joining_engine
joins only while no update is closed to joining_engines, and only with the version that
the fleet holds then; so an update includes it, or ends first. Every wait ends: a
joining engine loads twice at most, and an update gives up a joining engine at the
deadline and continues.

A verification of the engines' weights is a reader, too: it holds updates from its
start.

Use from one event loop. Independent of how weights are moved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from invrl.errors import WeightSyncError
from invrl.types.weights import WeightVersion

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reader:
    """A joining_engine, or a verification, that reads the memory of a version."""

    engine: str
    """Name of the engine or of the verification."""
    version: WeightVersion
    holds_updates: bool
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Cancels the joining_engine's work once it is given up."""
    given_up: str = ""
    """Reason that the joining engine was given up; "" while it may continue."""


class JoiningEngines:
    """Coordination of joining engines and updates. JoiningEngines use `reading` and
    `until_open`; updates, which run one at a time, use the rest."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._readers: list[_Reader] = []
        self._is_closed = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def reading(
        self, engine: str, version: WeightVersion, *, holds_updates: bool = False
    ) -> AsyncIterator[None]:
        """Keep the memory of this version from being overwritten within the block.
        `holds_updates`: updates wait for the end of the block before they close.

        Raises WeightSyncError, at any await of the block, when an update gives the
        joining_engine up.
        """
        reader = _Reader(engine=engine, version=version, holds_updates=holds_updates)
        self._readers.append(reader)
        try:
            async with reader.limit:
                yield
        except TimeoutError:
            if not reader.given_up:
                raise
        finally:
            self._forget(reader)
        if reader.given_up:
            raise WeightSyncError(reader.given_up, engine=engine)

    async def until_open(self) -> None:
        """Wait until no update is closed to joining_engines. Updates have deadlines, so
        this wait needs none."""
        await self._until(lambda: not self._is_closed)

    async def wait_until_only_reads(self, version: WeightVersion) -> None:
        """Wait until joining engines read only this version: the memory of every other
        one is free to write."""
        waited_for = f"to finish with a version older than {version}"
        await self._wait_for_readers(
            lambda reader: reader.version != version, waited_for
        )

    async def wait_for_joins(self) -> None:
        """Wait for the joining engines that are about to join. `closed` must follow
        without an await."""
        await self._wait_for_readers(lambda reader: reader.holds_updates, "to finish")

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep joining engines from joining within the block."""
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False
            self._changed.set()

    async def _wait_for_readers(
        self, blocks: Callable[[_Reader], bool], waited_for: str
    ) -> None:
        """Wait until no reader blocks; at the deadline give up those that do."""
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._until(
                    lambda: not any(blocks(reader) for reader in self._readers)
                )
        except TimeoutError:
            for reader in [reader for reader in self._readers if blocks(reader)]:
                wait = f"an update waited {self._deadline_s:g} s for it {waited_for}"
                reader.given_up = f"{reader.engine} is given up: {wait}"
                logger.error("%s", reader.given_up)
                reader.limit.reschedule(asyncio.get_running_loop().time())
                # It no longer counts, however long it takes to end.
                self._forget(reader)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _forget(self, reader: _Reader) -> None:
        if reader in self._readers:
            self._readers.remove(reader)
        self._changed.set()
