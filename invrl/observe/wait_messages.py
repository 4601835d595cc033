"""What a run says while it makes no step: every 30 s what it waits for, why, and what to set.

Pure but for `tell_silence`, which asks the buffer. Lines are for a person: what happened, then what to do."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from invrl.buffer.wait_report import WaitReport, shown_rewards
from invrl.errors import DeadlineError, ServerError
from invrl.observe.sinks import Sink
from invrl.store.run_store import WaitsOutside

logger = logging.getLogger(__name__)
SAID_EVERY_S = 30.0
_LOOK_EVERY_S = 1.0
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The settings that end a wait, for what is said of it."""

    rollout_timeout_s: float
    filtered_out: str
    lease_timeout_s: float = 0.0
    session_idle_timeout_s: float = 0.0


class Activity(Sink):
    """What the run does now, since when, and when its last step ended. `clock`: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase_name = ""
        self.step_number = 0
        self.phase_began = clock()
        self._quiet_since = clock()

    def phase(self, name: str, step: int) -> None:
        if (name, step) != (self.phase_name, self.step_number):
            self.phase_name = name
            self.step_number = step
            self.phase_began = self._clock()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._quiet_since = self._clock()

    def something_was_said(self) -> None:
        self._quiet_since = self._clock()

    @property
    def phase_s(self) -> float:
        return self._clock() - self.phase_began

    def due(self) -> bool:
        """Whether nothing was said, and no step made, for `SAID_EVERY_S`. True once in that time."""
        now = self._clock()
        if now - self._quiet_since < SAID_EVERY_S:
            return False
        self._quiet_since = now
        return True


class Waits(Protocol):
    """The part of the buffer that is asked."""

    async def waiting(self) -> WaitReport: ...


class Notes(Protocol):
    def note(self, text: str) -> None: ...


async def tell_silence(
    buffer: Waits,
    activity: Activity,
    observer: Notes,
    deadlines: Deadlines,
    *,
    every_s: float = _LOOK_EVERY_S,
) -> None:
    """Until the buffer has died, of which the loop's own call tells the user."""
    activity.something_was_said()  # that everything is up
    while True:
        if activity.due():
            report = None
            try:
                report = await buffer.waiting() if activity.phase_name == "rollout" else None
            except DeadlineError as error:  # it is busy: the next question may be answered
                logger.warning("what the next batch waits for is not known at the moment: %s", error)
            except ServerError as error:
                return logger.warning("waits are not told any more: %s", error)
            observer.note(silence_text(activity, report, deadlines))
        await asyncio.sleep(every_s)


def silence_text(activity: Activity, report: WaitReport | None, deadlines: Deadlines) -> str:
    """`report`: None where the run does not wait for rollouts, or the buffer did not answer."""
    begun = f"step {activity.step_number}: {activity.phase_name} for {activity.phase_s:.0f} s"
    if report is None:
        return begun
    lines = [f"{begun}: {_state(report)}", *_reasons(report, deadlines)]
    return "\n    ".join(lines)


def _state(report: WaitReport) -> str:
    """Where the groups of the next batch are."""
    out = sum(group.missing for group in report.in_flight)
    parts = [
        f"{report.ready} of {report.wanted} groups ready",
        f"{len(report.in_flight)} in flight ({out} rollouts)",
        f"{report.complete} finished since the last batch",
    ]
    if report.dropped:
        parts.append(f"dropped: {_counts(report.dropped)}")
    failed = sum(report.failed.values())
    parts.append(f"{failed} rollouts failed{f' ({_counts(report.failed)})' if failed else ''}")
    return ", ".join(parts)


def _reasons(report: WaitReport, deadlines: Deadlines) -> list[str]:
    """Why no batch comes together, each with what to set."""
    reasons: list[str] = []
    if report.filtered_in_row:
        reasons.append(_filtered(report, deadlines))
    if report.dropped.get("stale"):
        reasons.append("stale groups are older than --max-staleness allows: raise it, or roll out faster")
    if report.failed and not report.complete:
        reasons.append("no group came through: failures are told above, and each of them in logs/driver.log")
    if report.source_end:
        reasons.append(f"no more tasks come: {report.source_end}")
    if report.in_flight:
        reasons.append(_longest(report, deadlines))
    return reasons


def _filtered(report: WaitReport, deadlines: Deadlines) -> str:
    row = f"the filter {report.filter_name} dropped the last {report.filtered_in_row} groups"
    rewards = shown_rewards(report.filtered_rewards)
    why = ""
    if report.filter_name == "nonzero_variance":
        why = " Rewards that are equal within a group teach nothing: the task is solved, or out of reach."
    after = "it goes on so for ever (--max-filtered-batches 0)"
    if report.filtered_limit:
        what = "the run ends with its model saved"
        if deadlines.filtered_out == "train":
            what = "groups are trained as they come"
        after = (
            f"after {report.filtered_limit} in a row {what} "
            f"(--max-filtered-batches, --filtered-out {deadlines.filtered_out})"
        )
    return f"{row} ({rewards}).{why} Set other tasks, or --group-filter none; {after}"


def _longest(report: WaitReport, deadlines: Deadlines) -> str:
    first = report.in_flight[0]
    text = (
        f"group {first.group_id} (task {first.task_id}) waits longest: {first.missing} of {first.size} "
        f"rollouts are out, for {first.since_s:.0f} s"
    )
    if report.outside is not None:
        return f"{text}. {_outside(report.outside, deadlines)}"
    return f"{text}; a rollout has failed after --rollout-timeout-s {deadlines.rollout_timeout_s:g}"


def _outside(outside: WaitsOutside, deadlines: Deadlines) -> str:
    """Whom the run waits for, where it is not us who run rollouts."""
    parts: list[str] = []
    if outside.offered:
        parts.append(
            f"{outside.offered} rollouts are on offer (POST /tasks/lease) and nobody has leased them"
        )
    if outside.leased:
        parts.append(
            f"{outside.leased} are leased and have no session; such a lease is void after --lease-timeout-s "
            f"{deadlines.lease_timeout_s:g}"
        )
    if outside.sessions:
        silent = ", ".join(f"{one.session_id} for {one.silent_s:.0f} s" for one in outside.sessions[:_SHOWN])
        more = f" and {len(outside.sessions) - _SHOWN} more" if len(outside.sessions) > _SHOWN else ""
        gone = f"an environment that makes no call for {deadlines.session_idle_timeout_s:g} s counts as gone"
        if not deadlines.session_idle_timeout_s:
            gone = "an environment may be silent for as long as its session lasts"
        parts.append(
            f"environments that have not ended their sessions, with the time since their last turn: {silent}"
            f"{more}; {gone} (--session-idle-timeout-s)"
        )
    return "; ".join(parts) or "their environments have ended them, and the outcomes are on their way"


def _counts(by_reason: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))
