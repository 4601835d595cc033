"""The buffer's state at a checkpoint, from which a later incarnation of the run resumes.

A snapshot is taken between `trained` and `advance`, when no batch is out. It holds no tasks: the task source
yields the same ones again."""

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
    """Also the position in the task source: each group took one task."""
    batches_taken: int
    in_flight: tuple[OpenGroup, ...]
    ready: tuple[OpenGroup, ...]
    counts: Mapping[RolloutState, int]
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    sequence: int
    """The number of the ledger's next entry. Entries with smaller numbers are of the surviving lineage."""
    incarnation: int = 0
    outbox_seq: int = 0
    """The number of the last outbox row that this snapshot includes."""
