"""What the fleet is at one moment, for those who only look at it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """Engines are named, as in the logs."""

    alive: Mapping[str, str]
    """The addresses of the engines that belong to the fleet."""
    lost: Sequence[str]
    """Engines that left and have not come back."""
    restarts: Mapping[str, int]
    """How often each engine that left was started again."""
    router_metrics_url: str
    """Where the router shows its own metrics for Prometheus."""
