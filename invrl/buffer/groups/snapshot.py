"""The buffer's state at a checkpoint, from which a later incarnation of the run
resumes.

A snapshot is taken between `trained` and `advance`, when no batch is out. It holds no
tasks of a plain task source, which yields the same ones again; of a source that records
outcomes, it holds its state and the tasks of the open groups (`task_feed.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from invrl.buffer.groups.task_feed import FeedSnapshot
from invrl.buffer.ledger.open_group import OpenGroup, RolloutState
from invrl.types.groups import TaskHistory
from invrl.types.weights import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSnapshot:
    version: WeightVersion
    trained: WeightVersion
    """Version that the trainer holds: one ahead of the buffer's until `advance`."""
    groups_leased: int
    """Number of leased groups, also the position in the task source: each group took
    one task."""
    batches_taken: int
    in_flight: tuple[OpenGroup, ...]
    ready: tuple[OpenGroup, ...]
    counts: Mapping[RolloutState, int]
    dropped: Mapping[str, int]
    failed: Mapping[str, int]
    sequence: int
    """Number of the ledger's next entry. Entries with smaller numbers are of the
    surviving lineage."""
    incarnation: int = 0
    outbox_seq: int = 0
    """Number of the last outbox row that this snapshot includes."""
    feed: FeedSnapshot | None = None
    """None: the task source is read again."""
    histories: tuple[TaskHistory, ...] = ()
    """Empty unless the group filter reads them."""
