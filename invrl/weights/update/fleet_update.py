"""The bookkeeping of one weight update, whose engines are called concurrently in each
phase.

An engine that fails in a phase that another engine passes is lost: it is not called
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from invrl.errors import ChecksumError, DeadlineError, LayoutError, WeightSyncError
from invrl.interfaces import WeightReceiver
from invrl.types.metrics import timed

logger = logging.getLogger(__name__)
Phase = Literal[
    "prepare", "pause", "sleep", "load", "commit", "wake", "resume", "canary"
]
_SHORT_PHASES = ("pause", "sleep", "commit", "wake", "resume")
_SHORT_PHASE_DEADLINE_S = 60.0
Call = Callable[[WeightReceiver], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class FleetUpdate:
    """Bookkeeping of one update: engines that take part, lost engines, and seconds of
    each phase."""

    deadline_s: float
    drain_timeout_s: float
    entered: Callable[[Phase], None]
    """Called when a phase begins."""
    receivers: tuple[WeightReceiver, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    lost: dict[str, Exception] = field(default_factory=dict)
    max_gaps: list[float] = field(default_factory=list)
    """Largest canary gaps, by engine; `mean_gaps` likewise."""
    mean_gaps: list[float] = field(default_factory=list)
    paused_at: float = 0.0
    paused: bool = False
    """Whether some engine may be paused."""
    asleep: bool = False
    """Whether some engine may lack the memory of its cache."""
    touched: bool = False
    """Whether some engine may have been written."""

    async def call_each(self, phase: Phase, call: Call) -> None:
        """Call all remaining engines concurrently, and wait for all of them.

        An engine that fails is lost, unless every engine fails: then the first failure
        is raised with its engine's name, and no engine is lost.
        """
        remaining = self.remaining()
        failures = await self._call_side_by_side(phase, remaining, call)
        if len(failures) == len(remaining):
            raise self._common_error(phase, failures) from next(iter(failures.values()))
        self._lose(phase, failures)

    async def try_each(self, phase: Phase, call: Call) -> None:
        """Call as `call_each` does, but lose a failing engine even if every engine
        fails."""
        failures = await self._call_side_by_side(phase, self.remaining(), call)
        self._lose(phase, failures)

    def raise_if_all_lost(self) -> None:
        if len(self.lost) == len(self.receivers):
            name, error = list(self.lost.items())[-1]
            reason = f"{name} was lost after the commit: {error}"
            if len(self.receivers) > 1:
                reason = f"every engine was lost after the commit, {reason}"
            raise WeightSyncError(reason, engine=name, unrestored=tuple(self.lost))

    def _common_error(
        self, phase: Phase, failures: Mapping[str, Exception]
    ) -> WeightSyncError:
        """Return the error of a phase that failed on every engine: the first failure,
        with its class if that is more specific than WeightSyncError."""
        name, *other_names = failures
        error = failures[name]
        message = f"{name} failed in phase {phase}: {error}"
        if other_names:
            message += f" (and so did {', '.join(other_names)})"
        if self.lost:
            message += f"; lost before: {', '.join(self.lost)}"
        if isinstance(error, LayoutError | ChecksumError):
            return type(error)(message, engine=name)
        return WeightSyncError(message, engine=name)

    def remaining(self) -> list[WeightReceiver]:
        return [engine for engine in self.receivers if engine.name not in self.lost]

    def _lose(self, phase: Phase, failures: Mapping[str, Exception]) -> None:
        for name, error in failures.items():
            logger.error(
                "%s is dropped from the update: it failed in phase %s: %s",
                name,
                phase,
                error,
            )
            self.lost[name] = error

    async def _call_side_by_side(
        self, phase: Phase, receivers: Sequence[WeightReceiver], call: Call
    ) -> Mapping[str, Exception]:
        """Return the failures by engine. A phase takes as long as its slowest
        engine."""
        deadline_s = self.deadline_s
        if phase in _SHORT_PHASES:
            deadline_s = min(deadline_s, _SHORT_PHASE_DEADLINE_S)
        if phase == "pause":
            deadline_s += self.drain_timeout_s

        async def call_failure(receiver: WeightReceiver) -> Exception | None:
            try:
                async with asyncio.timeout(deadline_s):
                    await call(receiver)
            except TimeoutError:
                return DeadlineError(f"engine {receiver.name}", deadline_s)
            except Exception as error:
                return error
            return None

        self.entered(phase)
        with timed(self.seconds, phase):
            errors = await asyncio.gather(
                *(call_failure(receiver) for receiver in receivers)
            )
        failures: dict[str, Exception] = {}
        for receiver, error in zip(receivers, errors, strict=True):
            if error is not None:
                failures[receiver.name] = error
        return failures
