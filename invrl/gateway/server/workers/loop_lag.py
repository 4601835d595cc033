"""Lag of the event loop: the first sign of an overloaded gateway."""

import asyncio
from collections import deque
from collections.abc import Mapping

_INTERVAL_S = 0.05
_WINDOW = 1200
"""Measurements of one minute."""


class LoopLag:
    """The lag of the running event loop over the last minute, in milliseconds."""

    def __init__(self) -> None:
        self._lags_ms: deque[float] = deque(maxlen=_WINDOW)

    async def measure(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_ms.append(1000 * (loop.time() - due))

    def summary(self) -> Mapping[str, float]:
        """Return the median, the 99th percentile and the maximum; 0 before the first
        measurement."""
        lags_ms = sorted(self._lags_ms)
        if not lags_ms:
            lags_ms = [0.0]
        median = lags_ms[len(lags_ms) // 2]
        percentile_99 = lags_ms[int(0.99 * len(lags_ms))]
        return {
            "p50": round(median, 3),
            "p99": round(percentile_99, 3),
            "max": round(lags_ms[-1], 3),
        }
