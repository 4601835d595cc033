"""A flush of an engine's cache keeps the GPU memory that torch holds ready.

An engine is flushed in the pause of an update. SGLang frees that memory in every flush
that is asked for over HTTP; to free it block by block, and to take it again for the
requests that go on, lengthens the pause. What SGLang flushes itself, before it gives
its memory to others, frees it as before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.flush_wrapper import (
        SchedulerFlushWrapper,
    )


def keep_memory_in_flushes() -> None:
    """To be called in the scheduler's process or in what it is forked from. Imports
    SGLang."""
    from sglang.srt.managers.scheduler_components.flush_wrapper import (
        SchedulerFlushWrapper,
    )

    initialise = SchedulerFlushWrapper.__init__

    def initialise_keeping(
        self: SchedulerFlushWrapper, *, flush_cache: Any, **others: Any
    ) -> None:
        initialise(self, flush_cache=partial(flush_cache, empty_cache=False), **others)

    SchedulerFlushWrapper.__init__ = initialise_keeping
