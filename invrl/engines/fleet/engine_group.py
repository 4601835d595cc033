"""Engines of a fleet that serve the same sessions, behind one router.

A fleet has one group, or two if engines are set aside for evaluation. Invariant: a group
is a set of names, so an engine that is started again is in the same one.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

from invrl.engines.fleet.fleet_router import FleetRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    names: Sequence[str]
    router: FleetRouter
    sessions: Literal["training", "evaluation"] | None
    """Sessions that it serves; None for all."""

    @property
    def described(self) -> str:
        """Describe the sessions for a message, behind a noun."""
        return "" if self.sessions is None else f" for {self.sessions}"

    def is_without(self, engines: Container[str]) -> bool:
        """Whether none of these engines is in the group."""
        return not any(name in engines for name in self.names)


def engine_groups(
    names: Sequence[str], eval_engines: int, make_router: Callable[[str], FleetRouter]
) -> list[EngineGroup]:
    """Return the group of all engines. With `eval_engines`, return the group of
    training, and then that of evaluation, which has the last names."""
    router = make_router("router")
    if not eval_engines:
        return [EngineGroup(names=names, router=router, sessions=None)]
    eval_router = make_router("eval-router")
    first = len(names) - eval_engines
    return [
        EngineGroup(names=names[:first], router=router, sessions="training"),
        EngineGroup(names=names[first:], router=eval_router, sessions="evaluation"),
    ]
