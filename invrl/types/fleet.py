"""The load of the engines, and the sessions that they serve: what the policy of a gate
reads, and what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a scheduler, or of several of one engine together. The names of the JSON
    are SGLang's."""

    running: int = msgspec.field(name="num_running_reqs", default=0)
    waiting: int = msgspec.field(name="num_waiting_reqs", default=0)
    kv_use: float = msgspec.field(name="token_usage", default=0.0)
    """Used share of the KV cache."""
    kv_tokens: int | None = msgspec.field(name="max_total_num_tokens", default=None)
    """Tokens that the KV cache holds; None if the engine does not report it."""
    kv_used: int = msgspec.field(name="num_used_tokens", default=0)
    """Tokens of running requests in the KV cache. The rest of it holds prefixes that
    may be evicted."""
    cache_hit_rate: float = 0.0
    """Hit rate of the last prompts. 0 also if SGLang's own metrics are off, as is the
    next field."""
    tokens_per_s: float = msgspec.field(name="gen_throughput", default=0.0)
    instance: str | None = None
    """Name that this start of the engine gives itself in its replies; None if it has
    none."""


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the engines at one moment."""

    engines: Mapping[str, EngineLoad] = {}
    """Engines that report their load, by name."""
    silent: tuple[str, ...] = ()
    """Engines that have never reported it."""
    eval_engines: tuple[str, ...] = ()
    """Names of the engines that are set aside for evaluation."""
    held_turns: int = 0
    """Turns that the gate holds. 0 in what a policy of the gate reads."""

    def serving(self, *, evaluation: bool) -> "FleetSnapshot":
        """Return the engines that are set aside for evaluation, or the others."""

        def serves(name: str) -> bool:
            return (name in self.eval_engines) == evaluation

        return FleetSnapshot(
            engines={name: load for name, load in self.engines.items() if serves(name)},
            silent=tuple(filter(serves, self.silent)),
        )

    def engine_of(self, instance: str | None) -> str | None:
        """Return the engine whose replies have this name. The only engine of a fleet
        needs none. None if it is unknown."""
        if len(self.engines) == 1 and not self.silent:
            return next(iter(self.engines))
        for name, load in self.engines.items():
            if instance is not None and load.instance == instance:
                return name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSession:
    """An open session, at the moment at which a policy decides."""

    id: str
    group_id: str
    group_opened_at: float
    """Unix seconds at which the first of the group's open sessions was opened."""
    state: Literal["idle", "running", "waiting"]
    """`waiting`: its next turn waits at the gate."""
    tokens: int
    """Tokens of its last turn, prompt and reply; of a waiting session those of the
    prompt of its next turn. 0 before the first turn."""
    engine: str | None
    """Engine of its last turn, or the only one; None before the first turn, and if that
    engine has left."""
    is_held: bool = False
    """Whether its next turn has been held: others may have taken its cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """Decision on the next turn of a waiting session."""

    hold: bool = False
    engine: str | None = None
    """Engine that it moves to; None: it stays where it is, or the router chooses."""
