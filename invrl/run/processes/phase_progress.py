"""Reports what a phase of the driver waits for, and how much of it: polled repeatedly,
only for the live display. A query without an answer leaves its text out; the run
continues."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from invrl.buffer.groups.wait_report import WaitReport
from invrl.errors import DeadlineError, ServerError
from invrl.observe.sinks.sinks import Sink
from invrl.observe.sinks.wait_messages import CurrentPhase

logger = logging.getLogger(__name__)
Question = Callable[[], Awaitable[str]]
_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class PhaseProgress:
    """Queries about the current phase. `report` runs alongside the phases. `questions`:
    by the name of the phase; modules that know an answer add them."""

    observer: Sink
    phase: CurrentPhase
    questions: dict[str, Question] = field(default_factory=dict)

    async def report(self, *, interval_s: float = _INTERVAL_S) -> None:
        """Poll until cancelled. Returns immediately if nobody shows the answers."""
        if not self.observer.shows_waits:
            return
        while True:
            await self._ask()
            await asyncio.sleep(interval_s)

    async def _ask(self) -> None:
        name = self.phase.name
        question = self.questions.get(name)
        if question is None:
            return
        try:
            text = await question()
        except DeadlineError:  # it is busy; the next query may succeed
            return
        except ServerError as error:
            logger.warning("what %s waits for is not shown any more: %s", name, error)
            del self.questions[name]
            return
        if self.phase.name == name:
            self.observer.awaits(text)


@dataclass(slots=True, eq=False)
class StartingParts:
    """Parts of a run that are not up yet."""

    names: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark this part as starting within the block."""
        self.names.append(name)
        try:
            yield
        finally:
            self.names.remove(name)

    async def wait_until_up(self, name: str, start: Awaitable[None]) -> None:
        with self.part(name):
            await start

    async def text(self) -> str:
        return self.awaited()

    def awaited(self) -> str:
        """Return the parts that are not up yet, such as "engines, trainer"."""
        return ", ".join(self.names)


def rollouts_text(report: WaitReport, group_size: int) -> str:
    """Describe how many rollouts of the next batch have ended: those of ready groups,
    and of the groups in flight that may complete the batch, the fullest first."""
    ended_in_flight = sorted(
        (group.size - group.missing for group in report.in_flight), reverse=True
    )
    needed_groups = max(0, report.wanted - report.ready)
    ready = min(report.ready, report.wanted)
    ended = ready * group_size + sum(ended_in_flight[:needed_groups])
    text = f"{ended} of {report.wanted * group_size} rollouts ({ready} of {report.wanted} groups ready)"
    if report.source_end:
        text += "; there are no more tasks"
    return text
