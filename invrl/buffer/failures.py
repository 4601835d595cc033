"""Failed rollouts in the buffer: those that count with a reward, and rows of failures that are the same."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from invrl.types import FailureReason, RolloutSummary

_FIRST_TOLD = 4
"""Identical failures before the first warning, while no rollout has finished yet."""
_LATER_TOLD = 64
"""The same once some have finished: a few bad tasks in a row need no warning."""
_TOLD_LINES = 6
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|ses-[0-9a-f]+|[0-9]+")
"""What differs between failures that are the same: quoted values, addresses, ids, numbers."""
_OF_A_PROCESS = frozenset(
    {FailureReason.WORKER_DIED, FailureReason.MEMORY, FailureReason.ENGINE, FailureReason.ENVIRONMENT_GONE}
)
"""One death fails all rollouts that it touches at once and in the same way, perhaps hundreds of them. The
worker pool and the fleet replace what died and count the deaths; such failures say nothing about the user's
code."""


def with_failure_reward(partial: RolloutSummary, failure: FailureReason, reward: float) -> RolloutSummary:
    """A failed rollout that counts with this reward. Children without a reward of their own inherit it."""
    inherited = {
        child: reward if partial.child_reward_from.get(child) == partial.session_id else value
        for child, value in partial.child_rewards.items()
    }
    return replace(partial, reward=reward, reward_components={}, child_rewards=inherited, failure=failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """What the console shows about failures."""

    failed: Mapping[str, int]
    """Rollouts failed since the start of the run, by reason."""
    finished: int
    """Rollouts that finished in this life."""
    alike: int
    """How many of the last rollouts failed in the same way, with none that finished in between."""
    reason: str = ""
    detail: str = ""
    """Of the last failure: as a rule the end of a traceback."""

    @property
    def may_end_run(self) -> bool:
        """Whether such failures end the run when there are too many of them."""
        return self.reason not in _OF_A_PROCESS


class FailureStreak:
    """How many of the last rollouts failed in the same way, none having finished in between."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.detail = ""
        self.finished_in_all = 0
        self._kind = ("", "")

    def failed(self, reason: FailureReason, detail: str) -> None:
        """Two failures are the same if their reasons and the last lines of their details are the same."""
        kind = (str(reason), _VARYING.sub("#", _last_line(detail)))
        self.count = self.count + 1 if kind == self._kind else 1
        self._kind = kind
        self.reason = str(reason)
        self.detail = detail

    def finished(self) -> None:
        self.count = 0
        self._kind = ("", "")
        self.finished_in_all += 1

    def report(self, failed: Mapping[str, int]) -> FailureReport:
        return FailureReport(
            failed=dict(failed),
            finished=self.finished_in_all,
            alike=self.count,
            reason=self.reason,
            detail=self.detail,
        )


class FailureTeller:
    """Decides when to warn that rollouts fail in the same way: early while none has finished, and again
    whenever there are four times as many."""

    def __init__(self, max_identical: int) -> None:
        self._max_identical = max_identical
        self._told = 0

    def text(self, report: FailureReport) -> str:
        """The warning that is due now; "" if there is none."""
        if report.alike < self._told:
            self._told = 0
        threshold = max(_LATER_TOLD if report.finished else _FIRST_TOLD, 4 * self._told)
        if report.alike < threshold:
            return ""
        self._told = report.alike
        which = "last" if report.finished else "first"
        ends = bool(self._max_identical) and report.may_end_run
        end = f"the run ends at {self._max_identical}" if ends else "the run goes on"
        return (
            f"warning: the {which} {report.alike} rollouts all failed alike ({report.reason}; {end}, "
            f"--max-identical-failures):\n{shown_detail(report.detail)}"
        )


def shown_detail(detail: str) -> str:
    """The last lines of a failure's detail, indented."""
    lines = detail.strip().splitlines()[-_TOLD_LINES:] or ["(no detail)"]
    return "\n".join(f"    {line}" for line in lines)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
