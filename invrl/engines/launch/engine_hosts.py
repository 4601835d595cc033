"""The nodes of a Ray cluster on which a fleet starts its engines, as the fleet sees
them. `run/hosts/placement.py` chooses them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """The node of an engine."""

    node_id: str
    """Ray's."""
    name: str
    address: str
    """Address at which its engine listens; the driver's node reaches it."""
    num_gpus: int | None
    """GPUs that the engine takes of it; None: it is on the CPU."""


class EngineHosts(Protocol):
    """Chooses the node of an engine."""

    def host_of(self, engine: str) -> EngineHost | None:
        """Return the node on which the engine is to start now; None while there is
        none."""
        ...

    @property
    def description(self) -> str:
        """Describe the nodes for a message."""
        ...
