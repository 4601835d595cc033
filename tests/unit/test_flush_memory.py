"""A flush that is asked for over HTTP keeps the memory that torch holds ready."""

from __future__ import annotations

from typing import Any

import pytest

from invrl.engines.inside_sglang.cache_flush import keep_memory_in_flushes
from invrl.host import sglang_on_cpu


def test_flush_of_the_scheduler_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sglang_on_cpu.make_importable()
    from sglang.srt.managers.io_struct import FlushCacheReqInput
    from sglang.srt.managers.scheduler_components.flush_wrapper import (
        SchedulerFlushWrapper,
    )

    monkeypatch.setattr(
        SchedulerFlushWrapper, "__init__", SchedulerFlushWrapper.__init__
    )
    flushes: list[dict[str, Any]] = []

    def flush_cache(**arguments: Any) -> bool:
        flushes.append(arguments)
        return True

    keep_memory_in_flushes()
    channels: Any = None
    wrapper = SchedulerFlushWrapper(
        flush_cache=flush_cache, is_fully_idle=lambda: True, ipc_channels=channels
    )
    for timeout_s in (None, 5.0):
        answer = wrapper.handle(FlushCacheReqInput(timeout_s=timeout_s))
        assert answer is not None
        assert answer.success
    assert flushes == 2 * [{"empty_cache": False}]
