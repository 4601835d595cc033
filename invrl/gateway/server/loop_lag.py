"""How late the event loop runs what is due: the first sign of a gateway that has too much to do."""

import asyncio
from collections import deque
from collections.abc import Mapping

_INTERVAL_S = 0.05
_KEPT = 1200
"""One minute."""


class LoopLag:
    """Lag of the running event loop over the last minute, in milliseconds."""

    def __init__(self) -> None:
        self._lags_ms: deque[float] = deque(maxlen=_KEPT)

    async def measure(self) -> None:
        """Runs until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_ms.append(1000 * (loop.time() - due))

    def summary(self) -> Mapping[str, float]:
        ordered = sorted(self._lags_ms) or [0.0]
        at = {"p50": len(ordered) // 2, "p99": int(0.99 * len(ordered)), "max": -1}
        return {name: round(ordered[index], 3) for name, index in at.items()}
