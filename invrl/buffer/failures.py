"""Failed rollouts in the buffer: rewards of failures, identical failures, limits that
end the run, and the console's warnings."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from invrl.errors import IdenticalFailuresError
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import RolloutSummary
from invrl.user_code.frame import USER_FRAME_PREFIX

_WARN_BEFORE_ANY_FINISHED = 4
"""Identical failures before the first warning, while no rollout has finished."""
_WARN_AFTER_SOME_FINISHED = 64
"""The same, once some have finished: a few bad tasks in a row need no warning."""
GROUP_FILTER = "group_filter"
"""Key of an exception of the group filter among the first failures by reason."""
RECORD_FAILED = "task_source_record"
"""Key of the first exception of a task source's `record` there."""
STATE_LOST = "task_source_state"
"""Key of the first error of its `state()` there, or of a resume without a state."""
_USER_CODE_FAULTS = {
    GROUP_FILTER: "the group filter failed, and its groups are dropped",
    RECORD_FAILED: "record() of the task source failed. The run goes on, and the source does not know of "
    f"those groups (counted as buffer/{RECORD_FAILED}_failed)",
    STATE_LOST: "the state of the task source is lost. The run goes on; a resume from a checkpoint without "
    f"it begins the task source anew (counted as buffer/{STATE_LOST}_failed)",
}
"""Console message about an error of user code that is not a rollout, by its key."""
_MAX_SHOWN_LINES = 6
_FRAME = '  File "'
"""Beginning of a traceback line that names a frame."""
_INSIDE_FRAME = "    "
"""Beginning of a traceback line that quotes a frame's code."""
_VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|ses-[0-9a-f]+|[0-9]+")
"""Parts that may differ between two identical failures: quoted values, addresses, ids,
numbers."""
_PROCESS_DEATHS = frozenset(
    {
        FailureReason.WORKER_DIED,
        FailureReason.MEMORY,
        FailureReason.ENGINE,
        FailureReason.ENVIRONMENT_GONE,
    }
)
"""Reasons in which the death of one process fails all of its rollouts together and in
the same way, perhaps hundreds of them. The worker pool and the fleet replace the dead
process and count the deaths. Such failures say nothing about the user's code."""


def with_failure_reward(
    partial: RolloutSummary, failure: FailureReason, reward: float
) -> RolloutSummary:
    """Turn a failed rollout into one that counts with this reward. Child sessions
    without their own reward inherit it."""
    child_rewards = dict(partial.child_rewards)
    for child in child_rewards:
        if partial.child_reward_from.get(child) == partial.session_id:
            child_rewards[child] = reward
    return replace(
        partial,
        reward=reward,
        reward_components={},
        child_rewards=child_rewards,
        failure=failure,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Failures so far, as the console shows them and the limits count them."""

    failed: Mapping[str, int]
    """Rollouts failed since the start of the run, by reason."""
    finished: int
    """Rollouts that finished in this incarnation."""
    alike: int
    """Number of last rollouts that failed in the same way, with no finished one in
    between."""
    reason: str = ""
    detail: str = ""
    """Message of the last failure, usually the end of a traceback."""
    firsts: Mapping[str, str] = field(default_factory=dict)
    """Detail of this incarnation's first failure of each reason."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Failed attempts of this incarnation that do not count with a reward, by reason,
    without deaths of processes."""
    counted: int = 0
    """Failed attempts of this incarnation that count with a reward."""
    first_ended: bool = True
    """Whether every attempt that began before the first failure has ended. Until then
    it is too early to say that every attempt fails: failing attempts are often faster
    than successful ones."""

    @property
    def may_end_run(self) -> bool:
        """Whether the run ends if the last failure repeats too often."""
        return self.reason not in _PROCESS_DEATHS

    @property
    def only_reason(self) -> str:
        """Single reason of all failed attempts so far. "" if attempts failed for
        several reasons, if one succeeded or counts with a reward, or if it is too early
        to say."""
        if self.finished or self.counted:
            return ""
        if not self.first_ended:
            return ""
        if len(self.attempts) != 1:
            return ""
        return next(iter(self.attempts))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """Number of failures that ends a run; 0: no limit."""

    identical: int
    """Identical failures in a row, with no finished rollout in between."""
    at_start: int
    """Failures for the same reason, while no rollout has finished and none failed for
    another reason."""

    def check(self, report: FailureReport) -> None:
        """Raise IdenticalFailuresError if there are too many."""
        self._check_start(report)
        self._check_identical(report)

    def _check_start(self, report: FailureReport) -> None:
        reason = report.only_reason
        if not self.at_start or not reason:
            return
        count = report.attempts[reason]
        if count < self.at_start:
            return
        first_failure = _in_one_line(report.firsts[reason])
        text = f"all {count} rollouts so far failed ({reason}). The first one: {first_failure}"
        fix = "correct what it names, or raise --failures.max-at-start (0: no limit)"
        if reason == FailureReason.EXCEPTION:
            fix += "; if the model's replies cause it, let it count: --failures.reward exception=0"
        raise IdenticalFailuresError(text, fix=fix)

    def _check_identical(self, report: FailureReport) -> None:
        if not self.identical or not report.may_end_run:
            return
        if report.alike < self.identical:
            return
        last_failure = _in_one_line(report.detail)
        text = f"the last {report.alike} rollouts all failed alike ({report.reason}): {last_failure}"
        fix = "correct what it names, or raise --failures.max-identical (0: no limit)"
        raise IdenticalFailuresError(text, fix=fix)


class FailureStreak:
    """Counts how many of the last rollouts failed in the same way, with no finished one
    in between."""

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""
        self.detail = ""
        self.finished_in_all = 0
        self.firsts: dict[str, str] = {}
        self.attempts: Counter[str] = Counter()
        self.counted = 0
        self._kind = ("", "")

    def failed(
        self, reason: FailureReason, detail: str, *, counts: bool = False
    ) -> None:
        """Record a failure; `counts`: it counts with a reward.

        Two failures are identical if their reasons and the last lines of their details
        are. If user code raised, that line names the line of user code.
        """
        kind = (str(reason), _VARYING.sub("#", _last_line(detail)))
        if kind == self._kind:
            self.count += 1
        else:
            self.count = 1
        self._kind = kind
        self.reason = str(reason)
        self.detail = detail
        self.firsts.setdefault(str(reason), detail)
        if counts:
            self.counted += 1
        elif reason not in _PROCESS_DEATHS:
            self.attempts[str(reason)] += 1

    def note_user_code(self, key: str, detail: str) -> None:
        """Keep the first error of each kind of user code that is not a rollout."""
        self.firsts.setdefault(key, detail)

    @property
    def none_ended(self) -> bool:
        """Whether no rollout of this incarnation has failed or finished yet."""
        return not (self.count or self.finished_in_all)

    def finished(self) -> None:
        self.count = 0
        self._kind = ("", "")
        self.finished_in_all += 1

    def report(
        self, failed: Mapping[str, int], *, first_ended: bool = True
    ) -> FailureReport:
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


class FailureReporter:
    """Decides which warnings about failures are due. The first failure of each reason
    is reported immediately. A streak of identical failures is reported early while no
    rollout has finished, and again whenever it is four times as long. `show_all` is the
    command that shows all failures."""

    def __init__(self, limits: FailureLimits, *, show_all: str = "") -> None:
        self._limits = limits
        self._show_all = show_all
        self._reported_length = 0
        """Length of the streak of identical failures when it was last reported."""
        self._reported_reasons: set[str] = set()

    def texts(self, report: FailureReport) -> list[str]:
        """Return the warnings that are due now."""
        texts: list[str] = []
        for reason, detail in report.firsts.items():
            if reason in self._reported_reasons:
                continue
            self._reported_reasons.add(reason)
            what = _USER_CODE_FAULTS.get(
                reason, f"the first rollout that failed ({reason})"
            )
            text = f"warning: {what}:\n{shown_detail(detail)}"
            if self._show_all and reason not in _USER_CODE_FAULTS:
                text += f"\n    the others may say something else: {self._show_all}"
            texts.append(text)
        streak_warning = self._streak_warning(report)
        if streak_warning:
            texts.append(streak_warning)
        return texts

    def _streak_warning(self, report: FailureReport) -> str:
        """Return the warning about a streak of identical failures; "" if none is
        due."""
        if report.alike < self._reported_length:
            self._reported_length = 0
        which = "first"
        threshold = _WARN_BEFORE_ANY_FINISHED
        if report.finished:
            which = "last"
            threshold = _WARN_AFTER_SOME_FINISHED
        if report.alike < max(threshold, 4 * self._reported_length):
            return ""
        self._reported_length = report.alike
        return (
            f"warning: the {which} {report.alike} rollouts all failed alike ({report.reason}; "
            f"{self._consequence(report)}):\n{shown_detail(report.detail)}"
        )

    def _consequence(self, report: FailureReport) -> str:
        """Say at how many such failures the run ends."""
        counts_at_start = not report.finished and report.attempts.get(report.reason)
        if counts_at_start and self._limits.at_start:
            return f"the run ends at {self._limits.at_start}, --failures.max-at-start"
        if self._limits.identical and report.may_end_run:
            return f"the run ends at {self._limits.identical}, --failures.max-identical"
        return "the run goes on"


def shown_detail(detail: str) -> str:
    """Return the displayed lines of a failure's detail, indented."""
    return "\n".join(f"    {line}" for line in _shown_lines(detail))


def _shown_lines(detail: str) -> list[str]:
    """Return the last lines of a failure's detail. If the last line names the line of
    user code, the frames of the traceback are left out: the log has them."""
    lines = detail.strip().splitlines() or ["(no detail)"]
    names_user_code = lines[-1].startswith(USER_FRAME_PREFIX)
    frames = [number for number, line in enumerate(lines) if line.startswith(_FRAME)]
    if not names_user_code or not frames:
        return lines[-_MAX_SHOWN_LINES:]
    message = frames[-1] + 1
    while lines[message].startswith(_INSIDE_FRAME):
        message += 1
    lines = lines[message:]
    if len(lines) > _MAX_SHOWN_LINES:
        return [*lines[: _MAX_SHOWN_LINES - 2], "...", lines[-1]]
    return lines


def _in_one_line(detail: str) -> str:
    return " ".join(line.strip() for line in _shown_lines(detail))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    if not lines:
        return ""
    return lines[-1].strip()
