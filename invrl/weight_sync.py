"""One weight update of the whole fleet as a transaction, the same for every carrier.

    stage ─► prepare ─► pause ─► load ─► checksums ─► commit ─► resume ─► canary
      └────────┴─ nothing touched   └───────┴────────────┴─ old weights back, old version, resume

Invariant: all engines hold the new version or none does. A failure before the commit is complete puts
the weights staged before back into every engine that was told to load, proves that by checksum, and
resumes; an engine that cannot be restored stays paused and is named in the error. Nobody samples while
weights differ from the version's name. Pure over `interfaces`; called by the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np

from invrl.errors import CanaryError, ChecksumError, DeadlineError, LayoutError, WeightSyncError
from invrl.interfaces import StagedWeights, WeightReceiver, WeightSender
from invrl.metrics import timed
from invrl.types import WeightUpdate, WeightVersion

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
    committed: StagedWeights | None = field(default=None, init=False)
    """What the fleet holds: for an engine that is restarted. None before the first update."""

    async def run(self, version: WeightVersion) -> WeightUpdate:
        """Give `version` to every engine. Raises LayoutError, ChecksumError, CanaryError or another
        WeightSyncError; except after CanaryError every engine not in `unrestored` serves the old one."""
        update = _Update(receivers=tuple(await self.receivers()), deadline_s=self.deadline_s)
        if not update.receivers:
            raise WeightSyncError("the fleet has no engine to update")
        staged = await self._stage(update, version)
        try:  # from the pause to the commit on all engines
            update.paused_at = time.monotonic()
            await update.each("pause", lambda one: one.pause())
            update.touched = True
            await update.each("load", lambda one: load_verified(one, staged))
            await update.each("commit", lambda one: one.commit(version))
        except BaseException as error:  # cancellation too: no engine may stay paused or mixed
            unrestored = await self._roll_back(update)
            if isinstance(error, WeightSyncError):
                error.unrestored = unrestored
            raise
        self.committed = staged
        # Also when we are cancelled: an engine that stays paused holds its agents for ever.
        await asyncio.shield(asyncio.ensure_future(self._resume_committed(update)))
        maximum, mean = await self._canary(update, version)
        return WeightUpdate(
            version=version,
            num_bytes=staged.num_bytes,
            seconds=update.seconds,
            canary_max_gap=maximum,
            canary_mean_gap=mean,
            lost_engines=tuple(update.lost),
        )

    async def _stage(self, update: _Update, version: WeightVersion) -> StagedWeights:
        """Generation goes on meanwhile. Nothing is touched yet, so errors need no undoing."""
        try:
            with timed(update.seconds, "stage"):
                async with asyncio.timeout(self.deadline_s):
                    layout = await self.sender.layout()
                    staged = await self.sender.stage(version)
        except TimeoutError:
            raise WeightSyncError(f"staging took over {self.deadline_s} s") from None
        await update.each("prepare", lambda one: one.check(layout, staged))
        return staged

    async def _roll_back(self, update: _Update) -> tuple[str, ...]:
        """Names of the engines that could not be brought back to the old weights and resumed."""
        old = self.committed
        if update.touched:
            if old is None:
                return tuple(one.name for one in update.receivers)
            await update.try_each("load", lambda one: load_verified(one, old))
            await update.try_each("commit", lambda one: one.commit(old.version))
        await update.try_each("resume", lambda one: one.resume())
        return tuple(update.lost)

    async def _resume_committed(self, update: _Update) -> None:
        """Every engine is whole and new. One that does not resume is lost, not a reason to go back."""
        await update.try_each("resume", lambda one: one.resume())
        update.seconds["paused"] = time.monotonic() - update.paused_at
        update.raise_if_all_lost()

    async def _canary(self, update: _Update, version: WeightVersion) -> tuple[float, float]:
        """(largest, mean) gap over engines, prompts and tokens. CanaryError beyond the bound."""
        if not self.canary_prompts:
            return 0.0, 0.0
        found: dict[str, np.ndarray] = {}

        async def ask(one: WeightReceiver) -> None:
            found[one.name] = np.concatenate(await one.logprobs(self.canary_prompts))

        with timed(update.seconds, "canary"):
            expected = np.concatenate(await self.sender.logprobs(self.canary_prompts))
        await update.try_each("canary", ask)
        update.raise_if_all_lost()
        gaps = {name: np.abs(served - expected) for name, served in found.items()}
        for name, gap in gaps.items():
            maximum, mean = float(gap.max()), float(gap.mean())
            # "not <=": a NaN must not pass
            if not (maximum <= self.bound.max_gap and mean <= self.bound.mean_gap):
                raise CanaryError(
                    f"{name} serves another model than the trained one: on the canary prompts of version "
                    f"{version} log-probs differ by {maximum:.2e} at most and {mean:.2e} on average; "
                    f"the bounds are {self.bound.max_gap:.0e} and {self.bound.mean_gap:.0e}",
                    engine=name,
                )
        return max(float(gap.max()) for gap in gaps.values()), max(float(gap.mean()) for gap in gaps.values())


@dataclass(slots=True, kw_only=True)
class _Update:
    """One run's bookkeeping: who is in it, who was lost, what took how long."""

    receivers: tuple[WeightReceiver, ...]
    deadline_s: float
    seconds: dict[str, float] = field(default_factory=dict)
    lost: dict[str, Exception] = field(default_factory=dict)
    paused_at: float = 0.0
    touched: bool = False
    """Some engine may have been written."""

    async def each(self, phase: Phase, call: Call) -> None:
        """All engines side by side; waits for all, then raises the first failure, naming its engine."""
        for name, error in (await self._call(phase, self.receivers, call)).items():
            kind = type(error) if isinstance(error, LayoutError | ChecksumError) else WeightSyncError
            raise kind(f"{name} failed in phase {phase}: {error}", engine=name) from error

    async def try_each(self, phase: Phase, call: Call) -> None:
        """As `each`, but an engine that fails is lost: noted, and not called again."""
        remaining = [one for one in self.receivers if one.name not in self.lost]
        self.lost.update(await self._call(phase, remaining, call))

    def raise_if_all_lost(self) -> None:
        if len(self.lost) == len(self.receivers):
            name, error = next(iter(self.lost.items()))
            reason = f"every engine was lost after the commit, {name} with: {error}"
            raise WeightSyncError(reason, engine=name, unrestored=tuple(self.lost))

    async def _call(
        self, phase: Phase, receivers: Sequence[WeightReceiver], call: Call
    ) -> Mapping[str, Exception]:
        """What failed, by engine. The phase's seconds are those of the slowest."""
        deadline_s = min(self.deadline_s, _SHORT_S) if phase in _SHORT else self.deadline_s

        async def one(receiver: WeightReceiver) -> Exception | None:
            try:
                async with asyncio.timeout(deadline_s):
                    await call(receiver)
            except TimeoutError:
                return DeadlineError(f"engine {receiver.name}", deadline_s)
            except Exception as error:
                return error
            return None

        with timed(self.seconds, phase):
            errors = await asyncio.gather(*(one(receiver) for receiver in receivers))
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
