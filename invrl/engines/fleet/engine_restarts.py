"""The engines that have left the fleet, the reasons, and whether they may come back.

Invariant: an engine that the run starts is started again at most `most` times in an
hour. An external engine is awaited as often as it leaves.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Container

from invrl.errors import DeadlineError
from invrl.host.processes.process import RestartLimit

_LOG = logging.getLogger(__name__)
_HOUR_S = 3600.0


class EngineRestarts:
    """`external`: names of the engines that others start."""

    def __init__(self, most: int, *, external: Container[str] = ()) -> None:
        self._most = most
        self._external = external
        self.away: dict[str, str] = {}
        """Name -> reason, of the engines that left and have not come back."""
        self.counts: Counter[str] = Counter()
        """Restarts since the start of the fleet, by name."""
        self._limits = defaultdict(lambda: RestartLimit(most, period_s=_HOUR_S))
        self._overdue: set[str] = set()
        """Engines that left and did not come back within a deadline."""

    def left(self, name: str, reason: str) -> None:
        self.away[name] = reason

    def returned(self, name: str) -> None:
        self.away.pop(name, None)
        self._overdue.discard(name)

    def are_allowed(self, name: str) -> bool:
        return name in self._external or not self._limits[name].is_reached()

    def begin(self, name: str) -> str:
        """Count a restart. Returns its number and the limit as text."""
        self.counts[name] += 1
        self._limits[name].allows()
        count = str(self.counts[name])
        action = "is waited for"
        if name not in self._external:
            count += f", at most {self._most} in an hour"
            action = "is started again"
        _LOG.warning("%s %s (%s); it left: %s", name, action, count, self.away[name])
        return count

    def failed(self, name: str, error: Exception) -> None:
        """Record a failed restart. The next one may follow."""
        self.away[name] = f"it did not come back: {error}"
        if isinstance(error, DeadlineError) or name in self._external:
            self._overdue.add(name)

    def is_overdue(self, name: str) -> bool:
        """Whether the deadline for its return has passed. Nobody waits for it, but it
        may still come back."""
        return name in self._overdue

    def reasons(self, names: Collection[str]) -> str:
        """Return the reason that each of these engines left."""
        return "; ".join(f"{name}: {self.away[name]}" for name in names)
