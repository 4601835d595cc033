"""One weight update of the whole fleet as a transaction, the same for every transport.

    stage ─► prepare ─► pause ─► load ─► checksums ─► commit ─► resume ─► canary
      └────────┴─ nothing touched   └───────┴────────────┴─ old weights back, old version, resume

What becomes of requests in flight at the pause is the receiver's: they are retracted,
keep their cache, or have ended before (`weights.inflight`). With all three, no
token is sampled between pause and resume.

Invariant: when an update has ended, all engines that stay in the fleet hold the new
version, or all of them hold the old one. Nobody samples while the weights differ from
the version's name.

An engine that fails in a phase that another engine passes is lost: it is not called
again, the update goes on with the rest, and the caller takes it out of the fleet. A
phase in which every remaining engine fails ends the update. Then the weights staged
before are loaded again into every engine that may have been written, a checksum proves
them, and the engines resume. An engine that cannot be restored stays paused and is
named in the error.

In a rolling update each engine goes from the pause to the canary by itself, one after
the other, so that the others generate meanwhile under the version that they hold; each
token carries the version of its engine. Up to the first engine that passes its canary,
an engine that fails goes back to the old weights. From then on the update goes forwards
only: an engine that fails is lost. `_give_one_by_one` says the rest.

Where engines and trainer share a GPU, an update begins before there are weights for it:

    suspend: pause ─► sleep        the trainer makes a step
    run:     stage ─► prepare ─► load ─► checksums ─► commit ─► wake ─► resume ─► canary
               └────────┴──────────┴────────┴───────────┴─ old weights back, wake, resume

An engine that sleeps has no memory for its cache. No engine joins the fleet between
`suspend` and the end of `run`, unless every engine has died: then `run` waits, once the
weights are staged, for one that comes back with the old version.

Pure over `interfaces`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np

from invrl.errors import CanaryError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout, WeightReceiver, WeightSender
from invrl.types.metrics import timed
from invrl.types.weights import WeightUpdate, WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.canary_check import CanaryCheck
from invrl.weights.update.committed import Committed, Load, load_alone, load_verified
from invrl.weights.update.fleet_update import FleetUpdate, Phase
from invrl.weights.update.joining_engines import JoiningEngines

logger = logging.getLogger(__name__)


async def _at_once() -> None:
    """Return immediately."""


@dataclass(slots=True, eq=False)
class WeightTransaction:
    """Runs updates, one at a time, and remembers the last staged weights for a
    rollback."""

    sender: WeightSender
    receivers: Callable[[], Awaitable[Sequence[WeightReceiver]]]
    """Returns the engines of the fleet (`Fleet.receivers`). Each update calls it after
    staging, so engines that have joined by then take part."""
    _: KW_ONLY
    canary_prompts: Sequence[Sequence[int]]
    bound: CanaryBound
    until_engine: Callable[[], Awaitable[None]] = _at_once
    """Waits until the fleet has an engine, if that may come back
    (`Fleet.until_engine`). Called when the weights are staged."""
    deadline_s: float = 300.0
    """Deadline of each phase over all engines, which work concurrently; at most 60 s
    for a short phase."""
    drain_timeout_s: float = 0.0
    """Extra seconds that a pause may take while engines finish generating."""
    is_rolling: bool = False
    """Engines are updated one after the other while the others generate, instead of all
    together."""
    pauses: bool = True
    """Engines pause while they load. They do not where a version is loaded beside the
    one that they serve."""
    load: Load = load_alone
    """Loads into one engine. Concurrent loads may share work (`broadcast_loads.py`)."""
    committed: Committed | None = field(default=None, init=False)
    phase: Phase | Literal["stage", ""] = field(default="", init=False)
    """Phase of the update in progress; "" if there is none."""
    staged: WeightVersion | None = field(default=None, init=False)
    """The version that was staged last."""
    _joining_engines: JoiningEngines = field(init=False)
    _suspended: FleetUpdate | None = field(default=None, init=False)
    """Update that `suspend` began."""
    _closed: ExitStack = field(default_factory=ExitStack, init=False)
    """Holds joining engines off while engines are suspended."""

    def __post_init__(self) -> None:
        self._joining_engines = JoiningEngines(deadline_s=self.deadline_s)

    @property
    def _canary(self) -> CanaryCheck:
        return CanaryCheck(
            sender=self.sender, prompts=self.canary_prompts, bound=self.bound
        )

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Give `version` to every engine.

        Raises LayoutError, ChecksumError, CanaryError or another WeightSyncError. After
        any of them except CanaryError, every engine that is not in `unrestored` serves
        the old version; in a rolling update also after a CanaryError of the first
        engine.
        """
        try:
            return await self._run(version)
        finally:
            self.phase = ""

    async def suspend(self) -> Mapping[str, str]:
        """Begin the next update: pause every engine and free the memory of its cache,
        until `run`.

        Returns the engines that were lost, with the reasons: their processes may still
        hold memory. A fleet without engines has nothing to suspend. Raises
        WeightSyncError if every engine fails; those that are not in `unrestored` serve
        the old version.
        """
        update = self._begin()
        try:
            with ExitStack() as closed:
                with timed(update.seconds, "joining_engines"):
                    await self._joining_engines.wait_for_joins()
                closed.enter_context(self._joining_engines.closed())
                update.receivers = tuple(await self.receivers())
                try:
                    if update.receivers:
                        await self._pause(update)
                        update.asleep = True
                        await update.call_each("sleep", lambda engine: engine.sleep())
                except BaseException as error:
                    await self._roll_back_after(error, update, self.committed)
                    raise
                self._closed = closed.pop_all()
        finally:
            self.phase = ""
        lost = {name: str(error) for name, error in update.lost.items()}
        update.lost.clear()
        self._suspended = update
        return lost

    async def _run(self, version: WeightVersion) -> WeightUpdate:
        update = self._suspended or self._begin()
        self._suspended = None
        old = self.committed
        with self._closed.pop_all() as closed:
            try:
                return await self._give_version(update, version, closed)
            except BaseException as error:
                if update.asleep:  # it failed before an engine was written
                    await self._roll_back_after(error, update, old)
                raise

    async def _give_version(
        self, update: FleetUpdate, version: WeightVersion, closed: ExitStack
    ) -> WeightUpdate:
        """`closed`: holds joining engines off since `suspend`."""
        if self.committed is not None:
            with timed(update.seconds, "joining_engines"):
                await self._joining_engines.wait_until_only_reads(
                    self.committed.staged.version
                )
        self.phase = "stage"
        layout, staged = await self._stage(update, version)
        if not await self.receivers():
            # Those that come back are neither paused nor asleep.
            closed.close()
            update.paused = False
            update.asleep = False
        with timed(update.seconds, "joining_engines"):
            await self.until_engine()
            await self._joining_engines.wait_for_joins()
        with self._joining_engines.closed():
            await self._ask_receivers(update)
            await update.call_each(
                "prepare", lambda engine: engine.check(layout, staged)
            )
            prompts = self._canary.prompts_of(version, self.committed)
            new = Committed(staged=staged, layout=layout, canary_prompts=prompts)
            if self.is_rolling:
                await self._give_one_by_one(update, new)
            else:
                await self._give_to_all(update, new, old=self.committed)
        return WeightUpdate(
            version=version,
            num_bytes=staged.num_bytes,
            seconds=update.seconds,
            canary_max_gap=max(update.max_gaps, default=0.0),
            canary_mean_gap=max(update.mean_gaps, default=0.0),
            lost_engines={name: str(error) for name, error in update.lost.items()},
        )

    async def _ask_receivers(self, update: FleetUpdate) -> None:
        update.receivers = tuple(await self.receivers())
        if not update.receivers:
            raise WeightSyncError("the fleet has no engine to update")

    async def _pause(self, update: FleetUpdate) -> None:
        """Pause every engine. None generates until the commit."""
        update.paused_at = time.monotonic()
        update.paused = True
        await update.call_each("pause", lambda engine: engine.pause())

    async def _give_to_all(
        self, update: FleetUpdate, new: Committed, *, old: Committed | None
    ) -> None:
        """Take all engines of the update from the pause to the canary together. Raises
        as `run` does."""
        staged = new.staged
        try:
            if self.pauses and not update.paused:
                await self._pause(update)
            update.touched = True
            await update.call_each(
                "load", lambda engine: load_verified(engine, staged, self.load)
            )
            await update.call_each(
                "commit", lambda engine: engine.commit(staged.version)
            )
        except BaseException as error:
            # cancellation too: no engine may stay paused or mixed
            await self._roll_back_after(error, update, old)
            raise
        if self.committed is old:
            self.committed = new
        # Shielded from cancellation: an engine that stays paused would block its agents
        # for ever.
        resuming = asyncio.ensure_future(self._resume_committed(update))
        await asyncio.shield(resuming)
        committed = self.committed
        assert committed is not None, "the canary follows a commit"
        self.committed = await self._canary.check(update, committed)

    async def _give_one_by_one(self, update: FleetUpdate, new: Committed) -> None:
        """Take one engine after the other through the phases of `_give_to_all` while
        the others generate.

        An engine that fails before its commit goes back to the old weights. It is lost
        if another engine passes. If none passes, the first failure is raised, and all
        remaining engines hold the old version. A canary over its bound ends the update:
        if no engine has passed before, that engine goes back too.
        """
        old = self.committed
        has_passed = False
        failures: list[WeightSyncError] = []
        unrestored = list(update.lost)
        for engine in update.remaining():
            alone = self._begin(receivers=(engine,), seconds=update.seconds)
            try:
                await self._give_to_all(alone, new, old=old)
            except CanaryError as error:
                if old is not None and not has_passed:
                    self.committed = old
                    error.unrestored = await self._go_back(alone, old)
                raise
            except WeightSyncError as error:
                logger.error("%s is dropped from the update: %s", engine.name, error)
                update.lost[engine.name] = error
                failures.append(error)
                unrestored.extend(error.unrestored)
            else:
                has_passed = True
                update.max_gaps += alone.max_gaps
                update.mean_gaps += alone.mean_gaps
        if not has_passed:
            self.committed = old
            error = failures[0]
            error.unrestored = tuple(unrestored)
            raise error

    async def _go_back(self, update: FleetUpdate, old: Committed) -> tuple[str, ...]:
        """Give the old weights to engines that have resumed under the new ones. Returns
        the lost engines."""
        update.paused = True
        update.touched = True
        await update.try_each("pause", lambda engine: engine.pause())
        return await self._roll_back(update, old)

    async def bring_up(self, engine: WeightReceiver, join: Callable[[], None]) -> None:
        """Give the fleet's version to an engine that serves nobody yet, and prove it by
        checksum and canary. Then call `join`, which makes the engine one of
        `receivers`.

        Updates continue meanwhile (`joining_engines.py`). Raises WeightSyncError,
        before `join`."""
        is_late = False
        while True:
            await self._joining_engines.until_open()
            committed = self.committed
            if committed is None:
                raise WeightSyncError(
                    "the fleet holds no version yet", engine=engine.name
                )
            version = committed.staged.version
            async with self._joining_engines.reading(
                engine.name, version, holds_updates=is_late
            ):
                await self._give(engine, committed)
                await self._joining_engines.until_open()
                if (
                    self.committed is not None
                    and self.committed.staged.version == version
                ):
                    join()
                    return
            is_late = True

    def committed_update(self, version: WeightVersion) -> WeightUpdate | None:
        """Return the update to `version` if it was committed before it lost every
        engine: those that come back hold it. None if the fleet holds another
        version."""
        committed = self.committed
        if committed is None or committed.staged.version != version:
            return None
        return WeightUpdate(
            version=version,
            num_bytes=committed.staged.num_bytes,
            seconds={},
            canary_max_gap=0.0,
            canary_mean_gap=0.0,
        )

    @asynccontextmanager
    async def holding_committed(
        self, reader: str, wait_s: float
    ) -> AsyncIterator[Committed]:
        """Yield the committed weights. Within the block an update may stage, and waits
        before it touches an engine.

        Raises WeightSyncError if an update is in progress for `wait_s`, if no version
        has been committed, and at any await of the block when an update has waited for
        its end until the deadline.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._joining_engines.until_open()
        except TimeoutError:
            reason = f"a weight update has been in progress for {wait_s:g} s; ask again"
            raise WeightSyncError(reason) from None
        committed = self.committed
        if committed is None:
            raise WeightSyncError("no version of the weights has been committed yet")
        async with self._joining_engines.reading(
            reader, committed.staged.version, holds_updates=True
        ):
            yield committed

    async def _give(self, engine: WeightReceiver, committed: Committed) -> None:
        """Take one engine alone through the steps of an update. Raises
        WeightSyncError."""
        staged = committed.staged
        try:
            async with asyncio.timeout(self.deadline_s + self.drain_timeout_s):
                await engine.check(committed.layout, staged)
                await engine.pause()  # what it has cached is of other weights
                await load_verified(engine, staged, self.load)
                await engine.commit(staged.version)
                await engine.resume()
                if committed.canary_prompts:
                    served = await engine.logprobs(committed.canary_prompts)
                    expected = committed.canary
                    if expected is None:  # every engine died before it was asked
                        prompts = committed.canary_prompts
                        expected = np.concatenate(await self.sender.logprobs(prompts))
                    difference = np.concatenate(served) - expected
                    self.bound.check(engine.name, difference, staged.version)
        except TimeoutError:
            reason = f"{engine.name} did not take the fleet's version within {self.deadline_s:g} s"
            raise WeightSyncError(reason, engine=engine.name) from None

    def _begin(
        self,
        receivers: tuple[WeightReceiver, ...] = (),
        seconds: dict[str, float] | None = None,
    ) -> FleetUpdate:
        return FleetUpdate(
            deadline_s=self.deadline_s,
            drain_timeout_s=self.drain_timeout_s,
            receivers=receivers,
            seconds={} if seconds is None else seconds,
            entered=self._enter,
        )

    def _enter(self, phase: Phase) -> None:
        self.phase = phase

    async def _stage(
        self, update: FleetUpdate, version: WeightVersion
    ) -> tuple[WeightLayout, StagedWeights]:
        """Stage the version while generation continues. No engine has been touched, so
        an error needs no rollback."""
        try:
            with timed(update.seconds, "stage"):
                async with asyncio.timeout(self.deadline_s):
                    layout = await self.sender.layout()
                    staged = await self.sender.stage(version)
        except TimeoutError:
            raise WeightSyncError(f"staging took over {self.deadline_s} s") from None
        self.staged = version
        return layout, staged

    async def _roll_back_after(
        self, error: BaseException, update: FleetUpdate, old: Committed | None
    ) -> None:
        """Roll back as `_roll_back` does, and name the lost engines in the error."""
        unrestored = await self._roll_back(update, old)
        if isinstance(error, WeightSyncError):
            error.unrestored = unrestored

    async def _roll_back(
        self, update: FleetUpdate, old: Committed | None
    ) -> tuple[str, ...]:
        """Put the old weights back and resume. Returns the engines that were lost,
        before or now."""
        if update.touched:
            if old is None:
                return tuple(engine.name for engine in update.receivers)
            await update.try_each(
                "load", lambda engine: load_verified(engine, old.staged, self.load)
            )
            await update.try_each(
                "commit", lambda engine: engine.commit(old.staged.version)
            )
        await self._wake(update)
        if update.paused:
            await update.try_each("resume", lambda engine: engine.resume())
        return tuple(update.lost)

    async def _wake(self, update: FleetUpdate) -> None:
        """Give sleeping engines the memory of their caches back. An engine that finds
        too little is lost."""
        if update.asleep:
            update.asleep = False
            await update.try_each("wake", lambda engine: engine.wake())

    async def _resume_committed(self, update: FleetUpdate) -> None:
        """Resume the engines, which all hold the new version. An engine that does not
        resume is lost; nothing is rolled back."""
        paused_s = 0.0
        if update.paused:
            await self._wake(update)
            await update.try_each("resume", lambda engine: engine.resume())
            paused_s = time.monotonic() - update.paused_at
        update.seconds["paused"] = max(paused_s, update.seconds.get("paused", 0.0))
        update.raise_if_all_lost()
