"""The buffer's handle in the driver, without Ray: its deadlines and cancellations."""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from invrl.buffer.failures import FailureLimits, FailureReport, FailureReporter
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.errors import DeadlineError
from invrl.host.ray.actor import ActorHandle
from invrl.run.loop.failed_rollouts import report_failures

LIMITS = FailureLimits(identical=128, at_start=32)


def handle(answer: Future[FailureReport]) -> BufferHandle:
    """`answer`: what the actor's `failures` gives."""
    reference = SimpleNamespace(future=lambda: answer)
    actor = SimpleNamespace(failures=SimpleNamespace(remote=lambda: reference))
    return BufferHandle(actor=ActorHandle("the buffer", actor), batch_timeout_s=60.0)


async def test_cancellation_that_arrives_with_a_reply_is_not_lost() -> None:
    """Whoever cancels waits for the end of the task: a lost cancellation is a wait for
    ever."""
    answer: Future[FailureReport] = Future()

    class Screen:
        def failures(self, failed: object) -> None:
            pass

        def note(self, text: str) -> None:
            pass

    telling = asyncio.create_task(
        report_failures(
            handle(answer), FailureReporter(LIMITS), Screen(), interval_s=3600.0
        )
    )
    await asyncio.sleep(0)
    answer.set_result(FailureReport(failed={}, finished=0, alike=0))
    # the answer is in this loop now, and `telling` has not seen it
    await asyncio.sleep(0)
    telling.cancel()
    done, _ = await asyncio.wait({telling}, timeout=10.0)
    assert done, "it goes on"
    assert telling.cancelled()


async def test_call_without_a_reply_ends_at_its_deadline() -> None:
    answer: Future[FailureReport] = Future()
    impatient = dataclasses.replace(handle(answer), call_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"the buffer to answer failures\(\)"):
        await impatient.failures()
