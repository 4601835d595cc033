"""The buffer's handle in the driver, without Ray: its deadlines and cancellations."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from invrl.buffer.buffer_handle import BufferHandle
from invrl.buffer.failures import FailureLimits, FailureReport, FailureTeller
from invrl.errors import DeadlineError
from invrl.run.failed_rollouts import report_failures

LIMITS = FailureLimits(identical=128, at_start=32)


def handle(answer: Any) -> BufferHandle:
    """`answer`: what the actor's `failures` gives."""
    actor = SimpleNamespace(failures=SimpleNamespace(remote=lambda: answer))
    return BufferHandle(actor=actor, batch_timeout_s=60.0)


async def test_a_cancellation_that_comes_together_with_an_answer_is_not_lost() -> None:
    """Whoever cancels waits for the end of the task: a lost cancellation is a wait for ever."""
    answer: asyncio.Future[FailureReport] = asyncio.get_running_loop().create_future()

    class Screen:
        def failures(self, failed: object) -> None:
            pass

        def note(self, text: str) -> None:
            pass

    telling = asyncio.create_task(
        report_failures(handle(answer), FailureTeller(LIMITS), Screen(), interval_s=3600.0)
    )
    await asyncio.sleep(0)
    answer.set_result(FailureReport(failed={}, finished=0, alike=0))
    telling.cancel()
    done, _ = await asyncio.wait({telling}, timeout=10.0)
    assert done, "it goes on"
    assert telling.cancelled()


async def test_an_answer_that_does_not_come_has_a_deadline() -> None:
    answer: asyncio.Future[FailureReport] = asyncio.get_running_loop().create_future()
    impatient = dataclasses.replace(handle(answer), call_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"the buffer actor to answer failures\(\)"):
        await impatient.failures()
