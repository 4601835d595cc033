"""One weight update of the whole fleet as a transaction, the same for every transport.

    stage ─► prepare ─► pause ─► load ─► checksums ─► commit ─► resume ─► canary
      └────────┴─ nothing touched   └───────┴────────────┴─ old weights back, old version, resume

Invariant: all engines that stay in the fleet hold the new version, or all of them hold the old one. An engine
that fails in a phase which another one passes is lost: it is not called again, the update goes on with the
rest, and the caller takes it out of the fleet. A phase in which every remaining engine fails ends the update:
the weights staged before are put back into every engine that was told to load, a checksum proves it, and the
engines resume; one that cannot be restored stays paused and is named in the error. Nobody samples while
weights differ from the version's name. Pure over `interfaces`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from invrl.errors import CanaryError, ChecksumError, DeadlineError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightLayout, WeightReceiver, WeightSender
from invrl.metrics import timed
from invrl.types import WeightUpdate, WeightVersion

logger = logging.getLogger(__name__)
Phase = Literal["prepare", "pause", "load", "commit", "resume", "canary"]
_SHORT, _SHORT_S = ("pause", "commit", "resume"), 60.0
Call = Callable[[WeightReceiver], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBound:
    """Largest |engine - trainer| log-prob gap in nats on the canary prompts."""

    max_gap: float
    mean_gap: float

    @classmethod
    def for_dtypes(cls, *dtypes: str) -> CanaryBound:
        """The coarsest dtype of engine and trainer decides. fp32 against fp32 differs by 1e-5; bf16 by
        a few hundredths on average and far more on single unlikely tokens, so its mean is what tells."""
        if all(dtype == "float32" for dtype in dtypes):
            return cls(max_gap=1e-3, mean_gap=1e-3)
        return cls(max_gap=2.0, mean_gap=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What the fleet holds: enough to give it to an engine that comes later."""

    staged: StagedWeights
    layout: WeightLayout
    canary: NDArray[np.float32] | None = None
    """The trainer's log-probs of the canary prompts under these weights, one after another. None until the
    canary of their update has been asked, and where there are no canary prompts."""


@dataclass(slots=True, eq=False)
class WeightTransaction:
    """Remembers the weights staged last, to go back to. One update at a time."""

    sender: WeightSender
    receivers: Callable[[], Awaitable[Sequence[WeightReceiver]]]
    """The engines of the fleet, asked for at the start of each update (`Fleet.receivers`)."""
    _: KW_ONLY
    canary_prompts: Sequence[Sequence[int]]
    bound: CanaryBound
    deadline_s: float = 300.0
    """Of each phase, over all engines (they work side by side); of the short ones at most `_SHORT_S`."""
    committed: Committed | None = field(default=None, init=False)
    """None before the first update."""

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Give `version` to every engine. Raises LayoutError, ChecksumError, CanaryError or another
        WeightSyncError; except after CanaryError every engine not in `unrestored` serves the old one."""
        update = _Update(receivers=tuple(await self.receivers()), deadline_s=self.deadline_s)
        if not update.receivers:
            raise WeightSyncError("the fleet has no engine to update")
        layout, staged = await self._stage(update, version)
        try:
            await update.each("prepare", lambda engine: engine.check(layout, staged))
            # From here to the commit no engine generates.
            update.paused_at = time.monotonic()
            update.paused = True
            await update.each("pause", lambda engine: engine.pause())
            update.touched = True
            await update.each("load", lambda engine: load_verified(engine, staged))
            await update.each("commit", lambda engine: engine.commit(version))
        except BaseException as error:  # cancellation too: no engine may stay paused or mixed
            unrestored = await self._roll_back(update)
            if isinstance(error, WeightSyncError):
                error.unrestored = unrestored
            raise
        self.committed = Committed(staged=staged, layout=layout)
        # Also when we are cancelled: an engine that stays paused holds its agents for ever.
        await asyncio.shield(asyncio.ensure_future(self._resume_committed(update)))
        maximum, mean = await self._canary(update)
        return WeightUpdate(
            version=version,
            num_bytes=staged.num_bytes,
            seconds=update.seconds,
            canary_max_gap=maximum,
            canary_mean_gap=mean,
            lost_engines={name: str(error) for name, error in update.lost.items()},
        )

    async def bring_up(self, engine: WeightReceiver) -> None:
        """Give an engine that serves nobody the fleet's version, proved by checksum and by the canary. No
        update may run meanwhile: it would stage into memory that this reads. Raises WeightSyncError."""
        committed = self.committed
        if committed is None:
            raise WeightSyncError("the fleet holds no version yet", engine=engine.name)
        try:
            async with asyncio.timeout(self.deadline_s):
                await engine.check(committed.layout, committed.staged)
                await load_verified(engine, committed.staged)
                await engine.commit(committed.staged.version)
                if committed.canary is not None:
                    served = np.concatenate(await engine.logprobs(self.canary_prompts))
                    self._check_gap(engine.name, served - committed.canary, committed.staged.version)
        except TimeoutError:
            reason = f"{engine.name} did not take the fleet's version within {self.deadline_s:g} s"
            raise WeightSyncError(reason, engine=engine.name) from None

    async def _stage(self, update: _Update, version: WeightVersion) -> tuple[WeightLayout, StagedWeights]:
        """Generation goes on meanwhile. Nothing is touched yet, so errors need no undoing."""
        try:
            with timed(update.seconds, "stage"):
                async with asyncio.timeout(self.deadline_s):
                    layout = await self.sender.layout()
                    staged = await self.sender.stage(version)
        except TimeoutError:
            raise WeightSyncError(f"staging took over {self.deadline_s} s") from None
        return layout, staged

    async def _roll_back(self, update: _Update) -> tuple[str, ...]:
        """Names of the engines that were lost before, or could not be brought back to the old weights and
        resumed."""
        if update.touched:
            old = self.committed
            if old is None:
                return tuple(engine.name for engine in update.receivers)
            await update.try_each("load", lambda engine: load_verified(engine, old.staged))
            await update.try_each("commit", lambda engine: engine.commit(old.staged.version))
        if update.paused:
            await update.try_each("resume", lambda engine: engine.resume())
        return tuple(update.lost)

    async def _resume_committed(self, update: _Update) -> None:
        """Every engine is whole and new. One that does not resume is lost, not a reason to go back."""
        await update.try_each("resume", lambda engine: engine.resume())
        update.seconds["paused"] = time.monotonic() - update.paused_at
        update.raise_if_all_lost()

    async def _canary(self, update: _Update) -> tuple[float, float]:
        """(largest, mean) gap over engines, prompts and tokens. CanaryError beyond the bound."""
        committed = self.committed
        if not self.canary_prompts or committed is None:
            return 0.0, 0.0
        served: dict[str, NDArray[np.float32]] = {}

        async def ask(engine: WeightReceiver) -> None:
            served[engine.name] = np.concatenate(await engine.logprobs(self.canary_prompts))

        with timed(update.seconds, "canary"):
            expected = np.concatenate(await self.sender.logprobs(self.canary_prompts))
        await update.try_each("canary", ask)
        update.raise_if_all_lost()
        version = committed.staged.version
        gaps = [self._check_gap(name, logprobs - expected, version) for name, logprobs in served.items()]
        self.committed = replace(committed, canary=expected)
        return max(maximum for maximum, _ in gaps), max(mean for _, mean in gaps)

    def _check_gap(
        self, name: str, difference: NDArray[np.float32], version: WeightVersion
    ) -> tuple[float, float]:
        """(largest, mean) gap of one engine. CanaryError beyond the bound."""
        gap = np.abs(difference)
        maximum = float(gap.max())
        mean = float(gap.mean())
        # "not <=": a NaN must not pass
        if not (maximum <= self.bound.max_gap and mean <= self.bound.mean_gap):
            raise CanaryError(
                f"{name} serves another model than the trained one: on the canary prompts of version "
                f"{version} log-probs differ by {maximum:.2e} at most and {mean:.2e} on average; "
                f"the bounds are {self.bound.max_gap:.0e} and {self.bound.mean_gap:.0e}",
                engine=name,
            )
        return maximum, mean


@dataclass(slots=True, kw_only=True)
class _Update:
    """One run's bookkeeping: who is in it, who was lost, what took how long."""

    receivers: tuple[WeightReceiver, ...]
    deadline_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    lost: dict[str, Exception] = field(default_factory=dict)
    paused_at: float = 0.0
    paused: bool = False
    """Some engine may stand paused."""
    touched: bool = False
    """Some engine may have been written."""

    async def each(self, phase: Phase, call: Call) -> None:
        """All remaining engines side by side; waits for all. An engine that fails is lost, unless every one
        fails: that raises the first failure, naming its engine, and loses none."""
        remaining = self._remaining()
        failures = await self._call(phase, remaining, call)
        if len(failures) == len(remaining):
            name, error = next(iter(failures.items()))
            kind = type(error) if isinstance(error, LayoutError | ChecksumError) else WeightSyncError
            others = f" (and so did {', '.join([*failures][1:])})" if len(failures) > 1 else ""
            lost = f"; lost before: {', '.join(self.lost)}" if self.lost else ""
            raise kind(f"{name} failed in phase {phase}: {error}{others}{lost}", engine=name) from error
        self._lose(phase, failures)

    async def try_each(self, phase: Phase, call: Call) -> None:
        """As `each`, but engines that fail are lost also where every one does."""
        self._lose(phase, await self._call(phase, self._remaining(), call))

    def raise_if_all_lost(self) -> None:
        if len(self.lost) == len(self.receivers):
            name, error = next(reversed(self.lost.items()))
            reason = f"every engine was lost after the commit, {name} with: {error}"
            raise WeightSyncError(reason, engine=name, unrestored=tuple(self.lost))

    def _remaining(self) -> list[WeightReceiver]:
        return [engine for engine in self.receivers if engine.name not in self.lost]

    def _lose(self, phase: Phase, failures: Mapping[str, Exception]) -> None:
        for name, error in failures.items():
            logger.error("%s is dropped from the update: it failed in phase %s: %s", name, phase, error)
            self.lost[name] = error

    async def _call(
        self, phase: Phase, receivers: Sequence[WeightReceiver], call: Call
    ) -> Mapping[str, Exception]:
        """What failed, by engine. The phase's seconds are those of the slowest."""
        deadline_s = min(self.deadline_s, _SHORT_S) if phase in _SHORT else self.deadline_s

        async def outcome(receiver: WeightReceiver) -> Exception | None:
            try:
                async with asyncio.timeout(deadline_s):
                    await call(receiver)
            except TimeoutError:
                return DeadlineError(f"engine {receiver.name}", deadline_s)
            except Exception as error:
                return error
            return None

        with timed(self.seconds, phase):
            errors = await asyncio.gather(*(outcome(receiver) for receiver in receivers))
        pairs = zip(receivers, errors, strict=True)
        return {receiver.name: error for receiver, error in pairs if error is not None}


async def load_verified(receiver: WeightReceiver, staged: StagedWeights) -> None:
    """Load and prove it: ChecksumError unless the engine's parameters hash to what was staged."""
    await receiver.load(staged)
    held = await receiver.checksums(staged)
    wrong = [name for name, value in staged.checksums.items() if held.get(name) != value]
    if wrong or len(held) != len(staged.checksums):
        first, all_of = wrong[0] if wrong else "names", len(staged.checksums)
        reason = f"{len(wrong)} of {all_of} tensors are not what was sent, {first} first"
        raise ChecksumError(reason, engine=receiver.name)
