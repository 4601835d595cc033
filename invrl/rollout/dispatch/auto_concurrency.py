"""The number of rollouts that run at a time, adapted to the load of the engines.

`AutoConcurrency` is a pure state machine that is updated once a second: additive
increase while all slots are in use, every engine has room and the gate holds no turn;
multiplicative decrease while an engine is full. Invariants: the limit is at least 1 and
at most `most`. It rises only if it is used up, so it never exceeds the admitted work by
more than one step. It falls only if the running rollouts are within it, so the effect
of a decrease is seen before the next one. At a load that follows at once it therefore
moves within [0.75 L, L + engines], where L rollouts fill an engine.
"""

from collections.abc import Sequence

from invrl.types.fleet import EngineLoad, FleetSnapshot

_FULL_USE = 0.95
"""Use of a KV cache from which an engine is full."""
_ROOM_USE = 0.85
"""Use of every KV cache below which more rollouts are tried."""
_FULL_UPDATES = 3
"""Updates in a row in which an engine must be full: a request may wait for a moment."""
_RISE_UPDATES = 5
"""Updates between two increases, in which the load of new rollouts shows."""
_DECREASE = 0.75


class AutoConcurrency:
    """`start` is the first limit."""

    def __init__(self, start: int, *, most: int) -> None:
        self._limit = float(min(start, most))
        self._most = most
        self._num_engines = 0
        self._full_updates = 0
        """Updates in a row in which an engine was full."""
        self._since_rise = 0
        """Updates since the last increase."""

    @property
    def limit(self) -> int:
        return int(self._limit)

    def update(self, fleet: FleetSnapshot, *, running: int) -> int:
        """Return the limit for the next second. `running`: rollouts that run now.
        Without an engine that reports its load, the limit stays."""
        loads = [load for load in fleet.engines.values() if load.kv_tokens]
        if not loads:
            return self.limit
        self._follow_engines(len(loads))
        self._since_rise += 1
        self._full_updates = self._full_updates + 1 if _is_full(loads) else 0
        if self._full_updates >= _FULL_UPDATES and running <= self.limit:
            self._set(_DECREASE * running)
            self._full_updates = 0
        elif (
            running >= self.limit
            and _has_room(loads)
            and not fleet.held_turns
            and self._since_rise >= _RISE_UPDATES
        ):
            self._set(self._limit + len(loads))
            self._since_rise = 0
        return self.limit

    def _follow_engines(self, num_engines: int) -> None:
        """Lower the limit in proportion when engines leave. It rises by steps when they
        come back."""
        if num_engines < self._num_engines:
            self._set(self._limit * num_engines / self._num_engines)
        self._num_engines = num_engines

    def _set(self, limit: float) -> None:
        self._limit = min(max(limit, 1.0), float(self._most))


def _is_full(loads: Sequence[EngineLoad]) -> bool:
    """Whether an engine has requests that wait, or hardly any room in its KV cache."""
    return any(load.waiting > 0 or load.kv_use >= _FULL_USE for load in loads)


def _has_room(loads: Sequence[EngineLoad]) -> bool:
    return all(load.waiting == 0 and load.kv_use < _ROOM_USE for load in loads)
