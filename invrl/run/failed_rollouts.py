"""Rollouts of an evaluation that fail: the first of each reason is told at once, and the evaluation ends once
every rollout so far has failed for the same reason. An accuracy of 0 would hide that none was measured.

One object watches all evaluations of an incarnation: after a rollout that finished, failures are only
counted."""

from collections.abc import Callable, Mapping

from invrl.buffer.config import FailureRule
from invrl.buffer.failures import FailureLimits, FailureStreak, FailureTeller
from invrl.types import FailedRollout, FailureReason, Outcome


class EvaluationFailures:
    """`tell` is given each warning. `rules`: what becomes of failures in training; those that count with a
    reward there are the model's own, and end nothing here."""

    def __init__(
        self,
        *,
        at_start: int,
        rules: Mapping[FailureReason, FailureRule],
        tell: Callable[[str], object],
    ) -> None:
        self._limits = FailureLimits(identical=0, at_start=at_start)
        self._rules = rules
        self._tell = tell
        self._streak = FailureStreak()
        self._teller = FailureTeller(self._limits)
        self._failed: dict[str, int] = {}
        self._begun_first: set[str] = set()
        """Begun before the first rollout ended, and still running."""

    def began(self, group_id: str) -> None:
        """The rollouts of one task are about to run."""
        if not (self._streak.firsts or self._streak.finished_in_all):
            self._begun_first.add(group_id)

    def ended(self, group_id: str, outcomes: list[Outcome]) -> None:
        """Raises IdenticalFailuresError once there is no use in going on."""
        self._begun_first.discard(group_id)
        for outcome in outcomes:
            if isinstance(outcome, FailedRollout):
                self._failed[outcome.reason] = self._failed.get(outcome.reason, 0) + 1
                counts = isinstance(self._rules.get(outcome.reason), float)
                self._streak.failed(outcome.reason, outcome.detail, counts=counts)
            else:
                self._streak.finished()
        report = self._streak.report(self._failed, first_ended=not self._begun_first)
        for text in self._teller.texts(report):
            self._tell(f"evaluation: {text}")
        self._limits.check(report)
