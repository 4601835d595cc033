"""A buffer actor in this process, whose outbox and ledger are in memory."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

from invrl.buffer.buffer_actor import BufferActor, Outcome
from invrl.buffer.config import BufferConfig
from invrl.buffer.ledger import LedgerEntry
from invrl.rollout.config import RolloutConfig
from invrl.types import RolloutSummary, SampledSoFar, Task


class Outbox:
    """The run store's outbox in memory."""

    def __init__(self) -> None:
        self.rows: list[Outcome] = []
        self.broken = False

    def begin(self, *, parent: int, step: int, sequence: int) -> int:
        return 1

    def last_outbox_row(self) -> int:
        return len(self.rows)

    def write(self, entries: Iterable[LedgerEntry], *, to_disk: bool = False) -> None:
        self.kept = [*getattr(self, "kept", []), *entries]

    def close(self) -> None:
        pass

    def without_tokens(self, summaries: list[RolloutSummary]) -> dict[str, str]:
        return {}

    def outbox_after(self, seq: int, limit: int = 1000) -> list[tuple[int, Outcome]]:
        if self.broken:
            raise OSError("disk gone")
        return list(enumerate(self.rows, 1))[seq : seq + limit]

    def sampled_so_far(self, group_ids: list[str]) -> list[SampledSoFar]:
        return []


def endless() -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in itertools.count())


@asynccontextmanager
async def running_buffer(
    outbox: Outbox, *, batch: int = 2, tasks=endless
) -> AsyncIterator[BufferActor]:
    stores = {name: lambda path, **_: outbox for name in ("RunStore", "LedgerStore")}
    with patch.multiple("invrl.buffer.buffer_actor", **stores):
        actor = BufferActor(
            BufferConfig(),
            RolloutConfig(
                rollout_batch_size=batch, n_samples_per_prompt=2, rollout_max_attempts=1
            ),
            tasks_factory=tasks,
            run_store_path=Path("unused"),
            poll_interval_s=0.001,
        )
    await actor.start()
    yield actor
    await actor.close()
