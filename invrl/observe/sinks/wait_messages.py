"""Messages while no step ends: every 30 s what the run waits for, why, and which
setting changes that.

Pure, except `report_waits`, which polls the buffer. A message says what happened, then
what to do.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from invrl.buffer.groups.wait_report import WaitReport, shown_rewards
from invrl.errors import DeadlineError, ServerError
from invrl.observe.sinks.sinks import Sink
from invrl.store.run_store import ExternalWaits

logger = logging.getLogger(__name__)
MESSAGE_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 1.0
_MAX_SESSIONS_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Settings that end a wait, for the messages."""

    rollout_timeout_s: float
    filtered_out: str
    lease_timeout_s: float = 0.0
    session_idle_timeout_s: float = 0.0
    has_gate: bool = False


class CurrentPhase(Sink):
    """Current phase of the run, its start, and the time of the next message. `clock`:
    in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.name = ""
        self.step_number = 0
        self._began_at = clock()
        self._quiet_since = clock()

    def phase(self, name: str, step: int) -> None:
        if name != self.name or step != self.step_number:
            self.name = name
            self.step_number = step
            self._began_at = self._clock()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.restart_interval()

    def restart_interval(self) -> None:
        """Let the next message be due a whole interval from now."""
        self._quiet_since = self._clock()

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return self._clock() - self._began_at

    def is_message_due(self) -> bool:
        """Whether no step has ended for a whole interval. True once per interval."""
        now = self._clock()
        if now - self._quiet_since < MESSAGE_INTERVAL_S:
            return False
        self._quiet_since = now
        return True


class WaitSource(Protocol):
    """Part of the buffer that `report_waits` polls."""

    async def waiting(self) -> WaitReport: ...


class NoteScreen(Protocol):
    def note(self, text: str) -> None: ...


async def report_waits(
    buffer: WaitSource,
    phase: CurrentPhase,
    observer: NoteScreen,
    deadlines: Deadlines,
    *,
    interval_s: float = _POLL_INTERVAL_S,
) -> None:
    """Show a message whenever one is due, until cancelled. Returns if the buffer has
    died: the loop's own call then raises the cause."""
    phase.restart_interval()  # the message that everything is up has just been shown
    while True:
        if phase.is_message_due():
            report = None
            try:
                if phase.name == "rollout":
                    report = await buffer.waiting()
            except DeadlineError as error:
                # the buffer is busy; the next query may succeed
                logger.warning(
                    "the buffer did not say what the next batch waits for: %s", error
                )
            except ServerError as error:
                logger.warning("waits are not reported any more: %s", error)
                return
            observer.note(wait_message(phase, report, deadlines))
        await asyncio.sleep(interval_s)


def wait_message(
    phase: CurrentPhase, report: WaitReport | None, deadlines: Deadlines
) -> str:
    """Return the message. `report`: None if the run does not wait for rollouts, or the
    buffer did not answer."""
    heading = f"step {phase.step_number}: {phase.name} for {phase.seconds:.0f} s"
    if report is None:
        return heading
    lines = [
        f"{heading}: {_describe_groups(report)}",
        *_describe_reasons(report, deadlines),
    ]
    return "\n    ".join(lines)


def _describe_groups(report: WaitReport) -> str:
    """Describe the state of the next batch's groups."""
    rollouts_in_flight = sum(group.missing for group in report.in_flight)
    parts = [
        f"{report.ready} of {report.wanted} groups ready",
        f"{len(report.in_flight)} in flight ({rollouts_in_flight} rollouts)",
        f"{report.complete} finished since the last batch",
    ]
    if report.dropped:
        parts.append(f"dropped: {_describe_counts(report.dropped)}")
    if report.failed:
        failed = sum(report.failed.values())
        parts.append(f"{failed} rollouts failed ({_describe_counts(report.failed)})")
    else:
        parts.append("0 rollouts failed")
    return ", ".join(parts)


def _describe_reasons(report: WaitReport, deadlines: Deadlines) -> list[str]:
    """Describe why there is no batch yet; each reason with the setting to change."""
    reasons: list[str] = []
    if report.filtered_streak:
        reasons.append(_describe_filtered(report, deadlines))
    if report.dropped.get("stale"):
        reasons.append(
            "stale groups are older than --max-staleness allows: raise it, or roll out faster"
        )
    if report.failed and not report.complete:
        reasons.append(
            "no group has finished: failures are shown above, and each of them is in logs/driver.log"
        )
    if report.source_end:
        reasons.append(f"there are no more tasks: {report.source_end}")
    if report.in_flight:
        reasons.append(_describe_longest_wait(report, deadlines))
    return reasons


def _describe_filtered(report: WaitReport, deadlines: Deadlines) -> str:
    rewards = shown_rewards(report.filtered_rewards)
    text = (
        f"the filter {report.filter_name} dropped the last {report.filtered_streak} groups in a row "
        f"({rewards})."
    )
    if report.filter_name == "nonzero_variance":
        text += " Rewards that are equal within a group teach nothing: the task is solved, or out of reach."
    return f"{text} Use other tasks, or --group-filter none; {_describe_filter_limit(report, deadlines)}"


def _describe_filter_limit(report: WaitReport, deadlines: Deadlines) -> str:
    """Describe what happens if the filter drops every further group."""
    if not report.filtered_limit:
        return "there is no limit on such groups (--no-max-filtered-batches)"
    consequence = "the run ends and saves its model"
    if deadlines.filtered_out == "train":
        consequence = "groups are trained without the filter"
    return (
        f"after {report.filtered_limit} in a row {consequence} "
        f"(--max-filtered-batches, --filtered-out {deadlines.filtered_out})"
    )


def _describe_longest_wait(report: WaitReport, deadlines: Deadlines) -> str:
    group = report.in_flight[0]
    text = (
        f"group {group.group_id} (task {group.task_id}) waits longest: {group.missing} of {group.size} "
        f"rollouts are out, for {group.since_s:.0f} s"
    )
    if report.outside is not None:
        return f"{text}. {_describe_environments(report.outside, deadlines)}"
    text += (
        f"; a rollout fails after --rollout-timeout-s {deadlines.rollout_timeout_s:g}"
    )
    if deadlines.has_gate:
        text += ", which does not count the time for which the gate holds its turns"
    return text


def _describe_environments(outside: ExternalWaits, deadlines: Deadlines) -> str:
    """Describe the environments that the run waits for, if it does not run the rollouts
    itself."""
    parts: list[str] = []
    if outside.offered:
        parts.append(
            f"{outside.offered} rollouts are on offer (POST /tasks/lease) and nobody has leased them"
        )
    if outside.leased:
        parts.append(
            f"{outside.leased} are leased and have no session; such a lease is void after --session.lease-timeout-s "
            f"{deadlines.lease_timeout_s:g}"
        )
    if outside.sessions:
        parts.append(_describe_silent_sessions(outside, deadlines))
    if not parts:
        return "their environments have ended them, and the outcomes are on their way"
    return "; ".join(parts)


def _describe_silent_sessions(outside: ExternalWaits, deadlines: Deadlines) -> str:
    named = outside.sessions[:_MAX_SESSIONS_NAMED]
    silent = ", ".join(
        f"{session.session_id} for {session.silent_s:.0f} s" for session in named
    )
    not_named = len(outside.sessions) - len(named)
    if not_named:
        silent += f" and {not_named} more"
    limit = f"an environment that makes no call for {deadlines.session_idle_timeout_s:g} s counts as gone"
    if not deadlines.session_idle_timeout_s:
        limit = "an environment may be silent for as long as its session lasts"
    return (
        f"environments that have not ended their sessions, with the time since their last turn: {silent}; "
        f"{limit} (--session.idle-timeout-s)"
    )


def _describe_counts(by_reason: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))
