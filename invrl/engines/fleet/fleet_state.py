"""The state of the fleet at one moment, for observers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """State of a fleet. Engines are named as in the logs."""

    alive: Mapping[str, str]
    """Addresses of the fleet's engines."""
    lost: Sequence[str]
    """Engines that left and have not come back."""
    restarts: Mapping[str, int]
    """Number of restarts of each engine that left."""
    router_metrics: Mapping[str, str]
    """Prometheus addresses of the routers' own metrics, by the name of the router."""
