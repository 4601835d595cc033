"""The canary of an update: the log-probs that its engines and the trainer compute for
the same prompts, compared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from invrl.errors import CanaryError
from invrl.interfaces import WeightReceiver, WeightSender
from invrl.types.metrics import timed
from invrl.types.weights import WeightVersion
from invrl.weights.update.canary import CanaryBound
from invrl.weights.update.committed import Committed
from invrl.weights.update.fleet_update import FleetUpdate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryCheck:
    """Compares engines with the trainer.

    The first update uses all canary prompts, a later one only the next of them: agents
    wait while an engine computes it, and a wrong layer or parameter shows in any
    prompt. If that prompt is beyond the bound, all are computed, and their mean
    decides.
    """

    sender: WeightSender
    prompts: Sequence[Sequence[int]]
    bound: CanaryBound

    def prompts_of(
        self, version: WeightVersion, committed: Committed | None
    ) -> Sequence[Sequence[int]]:
        """Return the prompts of an update to `version`, when `committed` are held."""
        if committed is None or not self.prompts:
            return self.prompts
        return [self.prompts[version % len(self.prompts)]]

    async def check(self, update: FleetUpdate, committed: Committed) -> Committed:
        """Compare the engines of the update, and return what they hold with the
        trainer's log-probs. Raises CanaryError if all canary prompts together are
        beyond the bound: a single prompt may be, by the rounding of its few tokens."""
        if not committed.canary_prompts:
            return committed
        try:
            return await self._compare(update, committed)
        except CanaryError as error:
            if len(committed.canary_prompts) == len(self.prompts):
                raise
            logger.warning("all canary prompts are asked, because of one: %s", error)
            everything = replace(committed, canary_prompts=self.prompts, canary=None)
            return await self._compare(update, everything)

    async def _compare(self, update: FleetUpdate, committed: Committed) -> Committed:
        """Ask the engines, and beside them the trainer. Raises CanaryError beyond the
        bound."""
        served: dict[str, NDArray[np.float32]] = {}

        async def ask(engine: WeightReceiver) -> None:
            served[engine.name] = np.concatenate(
                await engine.logprobs(committed.canary_prompts)
            )

        with self._trainer_logprobs(update, committed) as trained:
            await update.try_each("canary", ask)
            update.raise_if_all_lost()
            with timed(update.seconds, "canary"):
                expected = await trained
        gaps: list[tuple[float, float]] = []
        for name, logprobs in served.items():
            gaps.append(
                self.bound.check(name, logprobs - expected, committed.staged.version)
            )
        update.max_gaps += [max_gap for max_gap, _ in gaps]
        update.mean_gaps += [mean_gap for _, mean_gap in gaps]
        return replace(committed, canary=expected)

    @contextmanager
    def _trainer_logprobs(
        self, update: FleetUpdate, committed: Committed
    ) -> Iterator[asyncio.Future[NDArray[np.float32]]]:
        """The trainer's log-probs of the canary prompts, which it computes within the
        block unless they are known.

        It is not asked before the engines have resumed: where it shares a GPU or cores
        with them, the pause would be longer.
        """

        async def ask() -> NDArray[np.float32]:
            if committed.canary is not None:
                return committed.canary
            with timed(update.seconds, "trainer_canary"):
                return np.concatenate(
                    await self.sender.logprobs(committed.canary_prompts)
                )

        asking = asyncio.ensure_future(ask())
        try:
            yield asking
        finally:
            asking.cancel()
            asking.add_done_callback(_ignore_error)


def _ignore_error(task: asyncio.Future[NDArray[np.float32]]) -> None:
    """Retrieve the error of a task that nobody awaits any more, so that asyncio does
    not warn."""
    if not task.cancelled():
        task.exception()
