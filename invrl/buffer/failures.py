"""Failed rollouts in the buffer: those that count with a reward, and rows of failures that are the same."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from invrl.errors import IdenticalFailuresError
from invrl.types import FailureReason, RolloutSummary
from invrl.user_frame import USER_FRAME_PREFIX

_FIRST_TOLD = 4
"""Identical failures before the first warning, while no rollout has finished yet."""
_LATER_TOLD = 64
"""The same once some have finished: a few bad tasks in a row need no warning."""
GROUP_FILTER = "group_filter"
"""Among the first failures by reason: an exception of the group filter."""
_TOLD_LINES = 6
_FRAME = '  File "'
_INSIDE_FRAME = "    "
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
    """Rollouts that finished in this incarnation."""
    alike: int
    """How many of the last rollouts failed in the same way, with none that finished in between."""
    reason: str = ""
    detail: str = ""
    """Of the last failure: as a rule the end of a traceback."""
    firsts: Mapping[str, str] = field(default_factory=dict)
    """The detail of this incarnation's first failure of each reason."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Attempts of this incarnation that failed without counting with a reward, by reason; deaths of
    processes are left out."""
    counted: int = 0
    """Attempts of this incarnation that failed and count with a reward."""
    first_ended: bool = True
    """Whether every attempt that was begun before the first failure has ended. Until then it is too early to
    say that every attempt fails: those that fail are often faster than those that do not."""

    @property
    def may_end_run(self) -> bool:
        """Whether such failures end the run when there are too many of them."""
        return self.reason not in _OF_A_PROCESS

    @property
    def only_reason(self) -> str:
        """The reason for which every attempt so far has failed; "" where there is another reason, a success
        or a failure that counts with a reward, or where it is too early to say."""
        if self.finished or self.counted or not self.first_ended or len(self.attempts) != 1:
            return ""
        return next(iter(self.attempts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """How many failures end a run; 0: however many there are, it goes on."""

    identical: int
    """In a row, all alike, and none finished in between."""
    at_start: int
    """While no rollout has finished: all of them, for the same reason."""

    def check(self, report: FailureReport) -> None:
        """Raises IdenticalFailuresError once there are too many."""
        reason = report.only_reason
        if self.at_start and reason and report.attempts[reason] >= self.at_start:
            text = f"all {report.attempts[reason]} rollouts so far failed ({reason}). The first one: "
            fix = "mend what it says, or raise --max-failures-at-start (0: no end)"
            if reason == FailureReason.EXCEPTION:
                fix += "; if the model's replies bring it about, let it count: --failure-reward exception=0"
            raise IdenticalFailuresError(text + _in_one_line(report.firsts[reason]), fix=fix)
        if self.identical and report.may_end_run and report.alike >= self.identical:
            said = _in_one_line(report.detail)
            text = f"the last {report.alike} rollouts all failed alike ({report.reason}): {said}"
            raise IdenticalFailuresError(
                text, fix="mend what it says, or raise --max-identical-failures (0: no end)"
            )


class FailureStreak:
    """How many of the last rollouts failed in the same way, none having finished in between."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.detail = ""
        self.finished_in_all = 0
        self.firsts: dict[str, str] = {}
        self.attempts: Counter[str] = Counter()
        self.counted = 0
        self._kind = ("", "")

    def failed(self, reason: FailureReason, detail: str, *, counts: bool = False) -> None:
        """Two failures are the same if their reasons and the last lines of their details are the same: where
        user code raised, that line names the line of user code. `counts`: with a reward."""
        kind = (str(reason), _VARYING.sub("#", _last_line(detail)))
        self.count = self.count + 1 if kind == self._kind else 1
        self._kind = kind
        self.reason = str(reason)
        self.detail = detail
        self.firsts.setdefault(str(reason), detail)
        if counts:
            self.counted += 1
        elif reason not in _OF_A_PROCESS:
            self.attempts[str(reason)] += 1

    def finished(self) -> None:
        self.count = 0
        self._kind = ("", "")
        self.finished_in_all += 1

    def report(self, failed: Mapping[str, int], *, first_ended: bool = True) -> FailureReport:
        return FailureReport(
            failed=dict(failed),
            finished=self.finished_in_all,
            alike=self.count,
            reason=self.reason,
            detail=self.detail,
            firsts=dict(self.firsts),
            attempts=dict(self.attempts),
            counted=self.counted,
            first_ended=first_ended,
        )


class FailureTeller:
    """Decides what is told of failures: the first of each reason at once, and rows of failures in the same
    way: early while none has finished, and again whenever there are four times as many."""

    def __init__(self, limits: FailureLimits) -> None:
        self._limits = limits
        self._told = 0
        self._told_reasons: set[str] = set()

    def texts(self, report: FailureReport) -> list[str]:
        """The warnings that are due now."""
        texts: list[str] = []
        for reason, detail in report.firsts.items():
            if reason not in self._told_reasons:
                self._told_reasons.add(reason)
                what = "the group filter failed, and its groups are dropped"
                if reason != GROUP_FILTER:
                    what = f"the first rollout that failed ({reason})"
                texts.append(f"warning: {what}:\n{shown_detail(detail)}")
        if row := self._row(report):
            texts.append(row)
        return texts

    def _row(self, report: FailureReport) -> str:
        if report.alike < self._told:
            self._told = 0
        threshold = max(_LATER_TOLD if report.finished else _FIRST_TOLD, 4 * self._told)
        if report.alike < threshold:
            return ""
        self._told = report.alike
        which = "last" if report.finished else "first"
        return (
            f"warning: the {which} {report.alike} rollouts all failed alike ({report.reason}; "
            f"{self._end(report)}):\n{shown_detail(report.detail)}"
        )

    def _end(self, report: FailureReport) -> str:
        """When such failures end the run."""
        if not report.finished and self._limits.at_start and report.attempts.get(report.reason):
            return f"the run ends at {self._limits.at_start}, --max-failures-at-start"
        if self._limits.identical and report.may_end_run:
            return f"the run ends at {self._limits.identical}, --max-identical-failures"
        return "the run goes on"


def shown_detail(detail: str) -> str:
    """What a failure's detail says, indented."""
    return "\n".join(f"    {line}" for line in told_lines(detail))


def told_lines(detail: str) -> list[str]:
    """The last lines of a failure's detail. Where they name the line of user code, the frames of the
    traceback before it are left to the log."""
    lines = detail.strip().splitlines() or ["(no detail)"]
    names_line = lines[-1].startswith(USER_FRAME_PREFIX)
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if names_line and frames:
        below = range(frames[-1] + 1, len(lines))
        message = next(number for number in below if not lines[number].startswith(_INSIDE_FRAME))
        lines = lines[message:]
        if len(lines) > _TOLD_LINES:
            lines = [*lines[: _TOLD_LINES - 2], "...", lines[-1]]
    return lines[-_TOLD_LINES:]


def _in_one_line(detail: str) -> str:
    return " ".join(line.strip() for line in told_lines(detail))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""
