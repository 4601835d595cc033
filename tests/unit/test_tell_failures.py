"""What a person is told of failed rollouts while a run goes on, also when the buffer is
busy for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from invrl.buffer.failures import FailureLimits, FailureReport, FailureReporter
from invrl.errors import DeadlineError, ServerError
from invrl.run.loop.failed_rollouts import report_failures

LIMITS = FailureLimits(identical=128, at_start=32)


class Screen:
    def __init__(self) -> None:
        self.counts: list[Mapping[str, int]] = []
        self.notes: list[str] = []
        self.noted = asyncio.Event()

    def failures(self, failed: Mapping[str, int]) -> None:
        self.counts.append(failed)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()


class Buffer:
    """Raises or returns one answer after another; the last one for ever."""

    def __init__(self, *answers: FailureReport | Exception) -> None:
        self._answers = list(answers)

    async def failures(self) -> FailureReport:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


ALIKE = FailureReport(
    failed={"bad_return": 4},
    finished=0,
    alike=4,
    reason="bad_return",
    detail="TypeError: a string",
)


async def test_busy_buffer_is_asked_again_for_its_failures() -> None:
    busy = DeadlineError("the buffer to answer failures()", 60.0)
    screen = Screen()
    buffer = Buffer(busy, busy, ALIKE)
    telling = asyncio.create_task(
        report_failures(buffer, FailureReporter(LIMITS), screen, interval_s=0.0)
    )
    try:
        noted = asyncio.create_task(screen.noted.wait())
        await asyncio.wait({telling, noted}, return_when=asyncio.FIRST_COMPLETED)
        assert screen.noted.is_set(), "the telling has ended"
    finally:
        telling.cancel()
        await asyncio.wait({telling})
    assert screen.counts[0] == {"bad_return": 4}
    assert "the first 4 rollouts all failed alike (bad_return" in screen.notes[0]
    assert "TypeError: a string" in screen.notes[0]


async def test_dead_buffer_is_not_asked_again_for_its_failures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = Buffer(ServerError("the buffer died"))
    await report_failures(buffer, FailureReporter(LIMITS), Screen(), interval_s=0.0)
    assert "the buffer died" in caplog.text
