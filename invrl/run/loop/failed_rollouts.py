"""Failed rollouts on the console: counts by reason, and warnings. In training the
buffer counts them; in an evaluation `EvaluationFailures` does, and ends the evaluation
when everything fails."""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from invrl.buffer.config import FailureRule
from invrl.buffer.failures import (
    FailureLimits,
    FailureReporter,
    FailureStreak,
)
from invrl.errors import DeadlineError, ServerError
from invrl.store.run_folder import RunFolder
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, Outcome

if TYPE_CHECKING:
    from invrl.buffer.process.buffer_handle import BufferHandle
    from invrl.observe.sinks.sinks import Sink

logger = logging.getLogger(__name__)
_POLL_INTERVAL_S = 1.0


def command_for_failures(folder: RunFolder, *, held_out: bool = False) -> str:
    """Return the command that shows the failed rollouts of the run; of its evaluations
    if `held_out`."""
    command = f"invrl samples {shlex.quote(str(folder.path))} --failed"
    return f"{command} --eval" if held_out else command


async def report_failures(
    buffer: BufferHandle,
    reporter: FailureReporter,
    observer: Sink,
    *,
    interval_s: float = _POLL_INTERVAL_S,
) -> None:
    """Show failed rollouts while a run trains, until cancelled. Returns if the buffer
    has died: the loop's own call then raises the cause."""
    while True:
        try:
            report = await buffer.failures()
        except DeadlineError as error:
            # the buffer is busy; the next query may succeed
            logger.warning(
                "the buffer did not say which rollouts have failed: %s", error
            )
        except ServerError as error:
            logger.warning("failed rollouts are not reported any more: %s", error)
            return
        else:
            observer.failures(report.failed)
            for text in reporter.texts(report):
                observer.note(text)
        await asyncio.sleep(interval_s)


class EvaluationFailures:
    """Failed rollouts of all evaluations of one incarnation. The first failure of each
    reason is shown immediately. When every rollout so far has failed for the same
    reason, the evaluation ends with an error: an accuracy of 0 would hide that nothing
    was measured. Once a rollout has finished, failures are only counted.

    `warn` receives each warning. `show_all`: the command that shows every failure.
    `rules`: treatment of failures in training. Failures that count with a reward there
    are the model's own, and do not end an evaluation.
    """

    def __init__(
        self,
        *,
        at_start: int,
        rules: Mapping[FailureReason, FailureRule],
        warn: Callable[[str], object],
        show_all: str = "",
    ) -> None:
        self._limits = FailureLimits(identical=0, at_start=at_start)
        self._rules = rules
        self._warn = warn
        self._streak = FailureStreak()
        self._reporter = FailureReporter(self._limits, show_all=show_all)
        self._failed: dict[str, int] = {}
        self._begun_first: set[str] = set()
        """Groups that began before the first rollout ended, and are still running."""

    def began(self, group_id: str) -> None:
        """Record that the rollouts of one task begin."""
        if not self._streak.firsts and not self._streak.finished_in_all:
            self._begun_first.add(group_id)

    def ended(self, group_id: str, outcomes: list[Outcome]) -> None:
        """Record that the rollouts of one task have ended. Raises
        IdenticalFailuresError if continuing is pointless."""
        self._begun_first.discard(group_id)
        for outcome in outcomes:
            if isinstance(outcome, FailedRollout):
                self._count(outcome)
            else:
                self._streak.finished()
        report = self._streak.report(self._failed, first_ended=not self._begun_first)
        for text in self._reporter.texts(report):
            self._warn(f"evaluation: {text}")
        self._limits.check(report)

    def _count(self, failure: FailedRollout) -> None:
        self._failed[failure.reason] = self._failed.get(failure.reason, 0) + 1
        has_reward = isinstance(self._rules.get(failure.reason), float)
        self._streak.failed(failure.reason, failure.detail, counts=has_reward)
