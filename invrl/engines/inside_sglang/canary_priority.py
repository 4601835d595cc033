"""Moves the canary of a weight update before the requests that wait in an engine's
queue.

These may be all requests that were in flight: a resume brings them back before the
canary arrives. Canaries go to the front of the queue under every scheduling policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import SchedulePolicy

_PREFIX = "invrl-canary-"


def canary_rid() -> str:
    """Return a request id of a canary."""
    return f"{_PREFIX}{uuid4().hex}"


def put_canaries_first() -> None:
    """Put canaries first. Call this in the scheduler's process or the one that it is
    forked from. Imports SGLang."""
    from sglang.srt.managers.schedule_policy import SchedulePolicy

    order = SchedulePolicy.calc_priority

    def order_canaries_first(
        self: SchedulePolicy,
        waiting_queue: list[Req],
        running_batch: ScheduleBatch | None = None,
        processed_tokens: int = 0,
    ) -> None:
        order(self, waiting_queue, running_batch, processed_tokens)
        waiting_queue.sort(key=lambda req: not req.rid.startswith(_PREFIX))  # stable

    SchedulePolicy.calc_priority = order_canaries_first
