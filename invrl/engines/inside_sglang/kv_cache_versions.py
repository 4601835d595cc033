"""Lets cached keys and values serve only requests that begin under the weights that
computed them.

SGLang finds cached tokens by the tokens and by an extra key of the request. Here that
key counts the changes of the engine's weights. A request gets it when it enters the
queue, and again if the weights change while it waits: at both times it holds no cache.
A running request keeps its key, so no later request finds its entries, which two
versions have computed.

This matters for `in_place`; `retract` and `drain` flush the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

_SEPARATOR = "|weights="


def key_with_changes(key: str | None, changes: int) -> str:
    """Replace the number of changes in a request's key, and keep the rest (an adapter,
    say)."""
    own, _, _ = (key or "").partition(_SEPARATOR)
    return f"{own}{_SEPARATOR}{changes}"


def separate_kv_of_versions() -> None:
    """Separate the versions. Call this in the scheduler's process or the one that it is
    forked from. Imports SGLang."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_serving

    enqueue = Scheduler._add_request_to_queue
    record_change = Scheduler.record_weight_version_change
    changes = 0

    def enqueue_with_key(self: Scheduler, req: Req, is_retracted: bool = False) -> None:
        req.extra_key = key_with_changes(req.extra_key, changes)
        enqueue(self, req, is_retracted)

    def record_change_and_rekey(self: Scheduler, new_version: str | None) -> None:
        nonlocal changes
        before = get_serving().weight_version
        record_change(self, new_version)
        if get_serving().weight_version == before:
            return
        changes += 1
        for req in self.waiting_queue:
            req.extra_key = key_with_changes(req.extra_key, changes)

    Scheduler._add_request_to_queue = enqueue_with_key
    Scheduler.record_weight_version_change = record_change_and_rekey
