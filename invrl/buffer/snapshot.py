"""The buffer as of a checkpoint: what a later incarnation of the run goes on from.

Taken between `trained` and `advance`, when no batch is out. Tasks are not in it: the source gives the same
ones again. Made and read by `buffer.py`, carried as bytes by `buffer_actor.py`."""

from collections.abc import Mapping
from dataclasses import dataclass

from invrl.buffer.open_group import OpenGroup, RolloutState
from invrl.types import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    version: WeightVersion
    trained: WeightVersion
    """The version that the trainer holds: one ahead of the buffer's until `advance`."""
    groups_leased: int
    """Also the data cursor: each group drew one task."""
    batches_taken: int
    in_flight: tuple[OpenGroup, ...]
    ready: tuple[OpenGroup, ...]
    counts: Mapping[RolloutState, int]
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    sequence: int
    """The ledger's next sequence number: its entries below are of the surviving lineage."""
    incarnation: int = 0
    outbox_seq: int = 0
    """Last outbox row that is in this snapshot."""
