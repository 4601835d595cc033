"""Keeps torch's cached GPU memory when an engine's cache is flushed.

An engine is flushed in the pause of an update. SGLang frees that memory in every flush
requested over HTTP; freeing it block by block and allocating it again for the resumed
requests lengthens the pause. SGLang's own flushes, before it gives its memory away,
still free it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.flush_wrapper import (
        SchedulerFlushWrapper,
    )


def keep_memory_in_flushes() -> None:
    """Keep memory in flushes. Call this in the scheduler's process or the one that it
    is forked from. Imports SGLang."""
    from sglang.srt.managers.scheduler_components.flush_wrapper import (
        SchedulerFlushWrapper,
    )

    initialise = SchedulerFlushWrapper.__init__

    def initialise_keeping(
        self: SchedulerFlushWrapper, *, flush_cache: Any, **others: Any
    ) -> None:
        initialise(self, flush_cache=partial(flush_cache, empty_cache=False), **others)

    SchedulerFlushWrapper.__init__ = initialise_keeping
