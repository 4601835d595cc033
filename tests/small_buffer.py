"""A buffer of small groups, alone or in its actor, and the outcomes that tests record
in it."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import GROUP_FILTERS
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.process.buffer_actor import BufferActor, Outcome
from invrl.interfaces import GroupFilter
from invrl.rollout.config import RolloutConfig
from invrl.types.leases import GroupLease, Place
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary, SampledSoFar
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


def summary(
    group_id: str,
    index: int,
    attempt: int = 0,
    *,
    reward: float = 1.0,
    oldest: int = 0,
    newest: int = 0,
    tokens: int = 5,
) -> RolloutSummary:
    return RolloutSummary(
        session_id=f"{group_id}.{index}.{attempt}",
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=attempt,
        reward=reward,
        num_turns=1,
        prompt_tokens=10,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=tokens,
        trained_tokens=tokens,
        truncated=False,
        oldest_version=WeightVersion(oldest),
        newest_version=WeightVersion(newest),
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


def failure(group_id: str, index: int, attempt: int = 0) -> FailedRollout:
    return FailedRollout(
        session_id=f"{group_id}.{index}.{attempt}",
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=attempt,
        reason=FailureReason.EXCEPTION,
        detail="boom",
    )


def finished(
    place: Place, *, reward: float, oldest: int, newest: int, tokens: int = 5
) -> RolloutSummary:
    return summary(
        place.group_id,
        place.index,
        place.attempt,
        reward=reward,
        oldest=oldest,
        newest=newest,
        tokens=tokens,
    )


def failed(
    place: Place, reason: FailureReason = FailureReason.TIMEOUT
) -> FailedRollout:
    return replace(
        failure(place.group_id, place.index, place.attempt), reason=reason, detail=""
    )


def tasks(count: int = 1000) -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in range(count))


def make(
    *,
    staleness: int = 0,
    over: int = 0,
    batch: int = 1,
    group: int = 2,
    attempts: int = 2,
    source: Iterator[Task] | None = None,
    group_filter: GroupFilter = GROUP_FILTERS["none"],
    entries: list[LedgerEntry] | None = None,
) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig(max_staleness=staleness, over_sampling_groups=over),
        RolloutConfig(
            rollout_batch_size=batch,
            n_samples_per_prompt=group,
            rollout_max_attempts=attempts,
        ),
        tasks=source if source is not None else tasks(),
        group_filter=group_filter,
        emit=[].append if entries is None else entries.append,
    )


def lease_all(buffer: GroupBuffer) -> list[GroupLease]:
    leases = []
    while (lease := buffer.lease()) is not None:
        leases.append(lease)
    return leases


def complete(
    buffer: GroupBuffer,
    group_id: str,
    *,
    oldest: int = 0,
    newest: int = 0,
    group: int = 2,
) -> None:
    for index in range(group):
        buffer.record(
            summary(group_id, index, reward=float(index), oldest=oldest, newest=newest)
        )


def through_bytes(buffer: GroupBuffer, trained: int) -> BufferSnapshot:
    """A snapshot of the buffer, as it comes back from its file."""
    snapshot = buffer.snapshot(WeightVersion(trained))
    return msgspec.json.decode(msgspec.json.encode(snapshot), type=BufferSnapshot)


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
    with patch.multiple("invrl.buffer.process.buffer_actor", **stores):
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


class HeldConnection:
    """A connection whose first COMMIT waits until it is let through."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.committing = threading.Event()
        self.let_through = threading.Event()

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        if sql == "COMMIT" and not self.let_through.is_set():
            self.committing.set()
            assert self.let_through.wait(120), "nobody let the commit through"
        return self._db.execute(sql, *values)

    def executemany(self, sql: str, rows: object) -> sqlite3.Cursor:
        return self._db.executemany(sql, rows)  # type: ignore[arg-type]

    def close(self) -> None:
        self._db.close()


async def started_on_held_ledger(
    path: Path,
) -> tuple[BufferActor, HeldConnection]:
    """A buffer of groups of two in the store at `path`."""
    actor = BufferActor(
        BufferConfig(group_filter="none"),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2),
        tasks_factory=lambda: (Task(id=f"t{n}", payload={}) for n in itertools.count()),
        run_store_path=path,
        poll_interval_s=0.0,
    )
    held = HeldConnection(actor._ledger._db)
    actor._ledger._db = held  # type: ignore[assignment]
    await actor.start()
    return actor, held
