"""Our own health check of engines: does the scheduler still make tokens?

The router asks `/server_info`, which a hung scheduler answers too. Invariant: an engine is judged only
while it may generate, so a pause (weight update) is never taken for a hang; it takes `failures` bad
answers in a row, and a dead process at once. Run by `fleet`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol


class Checked(Protocol):
    """What is watched."""

    @property
    def name(self) -> str: ...
    def alive(self) -> bool: ...
    def paused(self) -> bool: ...
    async def generates(self, *, deadline_s: float) -> bool: ...


class HealthCheck:
    """`round` looks once at every engine; `watch` does so every `interval_s` until cancelled."""

    def __init__(self, *, interval_s: float = 5.0, deadline_s: float = 30.0, failures: int = 3) -> None:
        """`deadline_s`: a busy engine may take long to get to the probe's token."""
        self._interval_s, self._deadline_s, self._failures = interval_s, deadline_s, failures
        self._failed: Counter[str] = Counter()

    async def round(self, engines: Mapping[str, Checked]) -> dict[str, str]:
        """Name -> reason of the engines that must leave."""
        verdicts = await asyncio.gather(*(self._judge(engine) for engine in engines.values()))
        return {name: verdict for name, verdict in zip(engines, verdicts, strict=True) if verdict}

    async def watch(
        self, engines: Callable[[], Mapping[str, Checked]], evict: Callable[[str, str], Awaitable[None]]
    ) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            for name, reason in (await self.round(engines())).items():
                await evict(name, reason)

    async def _judge(self, engine: Checked) -> str:
        if not engine.alive():
            return "its process has ended"
        if engine.paused():
            return ""
        generates = await engine.generates(deadline_s=self._deadline_s)
        # Paused while we asked: the silence proves nothing.
        if generates or engine.paused():
            del self._failed[engine.name]
            return ""
        self._failed[engine.name] += 1
        if self._failed[engine.name] < self._failures:
            return ""
        del self._failed[engine.name]
        return f"it made no token within {self._deadline_s} s, {self._failures} times in a row"
