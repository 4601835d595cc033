"""The actor as a plain class: the outbox is polled, takes wait and say what is
missing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from invrl.buffer.buffer_actor import BufferActor, Outcome
from invrl.buffer.config import BufferConfig
from invrl.buffer.ledger import LedgerEntry
from invrl.errors import BufferStateError, DeadlineError, RunStoreError
from invrl.metrics import resolve
from invrl.reasons import FailureReason
from invrl.rollout.config import RolloutConfig
from invrl.types import (
    FailedRollout,
    GroupLease,
    RolloutSummary,
    SampledSoFar,
    Task,
    WeightVersion,
)


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


def finish(
    lease: GroupLease, outbox: Outbox, *, equal: bool = False, newest: int = 0
) -> None:
    for member in lease.members:
        outbox.rows.append(
            RolloutSummary(
                session_id=f"{lease.group_id}.{member.index}.{member.attempt}",
                task_id=lease.task.id,
                group_id=lease.group_id,
                index=member.index,
                attempt=member.attempt,
                reward=0.0 if equal else float(member.index),
                num_turns=1,
                prompt_tokens=1,
                cached_tokens=0,
                later_prompt_tokens=0,
                later_cached_tokens=0,
                sampled_tokens=1,
                trained_tokens=1,
                truncated=False,
                oldest_version=WeightVersion(newest),
                newest_version=WeightVersion(newest),
                forks=0,
                started_at=0.0,
                finished_at=1.0,
            )
        )


def endless() -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in itertools.count())


def one() -> Iterator[Task]:
    return iter([Task(id="only", payload={})])


@asynccontextmanager
async def running(
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


async def test_outcome_from_the_outbox_wakes_a_waiting_take() -> None:
    outbox = Outbox()
    async with running(outbox) as actor:
        waiting = asyncio.create_task(actor.take(600.0))
        leases = [await actor.lease(), await actor.lease()]
        assert await actor.lease() is None
        for lease in leases:
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert lease is not None
            finish(lease, outbox)
        batch = await waiting
        assert [group.id for group in batch.groups] == ["g0", "g1"]
        await actor.record(outbox.rows[0])  # pushed as well: idempotent
        assert resolve(await actor.metrics())["outcomes_late"] == 1


async def test_new_version_wakes_a_waiting_take() -> None:
    outbox = Outbox()
    async with running(outbox, batch=1) as actor:
        lease = await actor.lease()
        assert lease is not None
        finish(lease, outbox, newest=1)
        waiting = asyncio.create_task(actor.take(600.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await actor.advance(WeightVersion(1))
        batch = await waiting
        with pytest.raises(BufferStateError, match="batch 0 is out"):
            await actor.take(600.0)
        await actor.trained(batch.batch_id)
        assert await actor.lease() is None
        await actor.advance(WeightVersion(2))
        assert await actor.lease() is not None


async def test_deadline_of_a_take_names_the_missing_groups() -> None:
    outbox = Outbox()
    async with running(outbox) as actor:
        leases = [await actor.lease(), await actor.lease()]
        assert leases[0] is not None
        finish(leases[0], outbox, equal=True)
        outbox.rows.append(
            FailedRollout(
                session_id="x",
                task_id="t1",
                group_id="g1",
                index=0,
                attempt=0,
                reason=FailureReason.TIMEOUT,
                detail="",
            )
        )
        lease = None
        while lease is None:
            lease = await actor.lease()
            await asyncio.sleep(0.001)
        finish(lease, outbox)
        while "1 ready, 0 in flight" not in str(actor._buffer):
            await asyncio.sleep(0.001)
        with pytest.raises(DeadlineError) as caught:
            await actor.take(0.3)
        assert "a batch of 2 groups; 1 ready, 0 in flight (at most 2 under way)" in str(
            caught.value
        )
        assert "groups dropped: 1 incomplete, 1 zero_variance" in str(caught.value)
        assert "rollouts failed: 1 timeout" in str(caught.value)


async def test_ended_task_source_fails_a_waiting_take_at_once() -> None:
    """Also when the end is found only after the last outcome came in."""
    outbox = Outbox()
    async with running(outbox, tasks=one) as actor:
        waiting = asyncio.create_task(actor.take(600.0))
        lease = await actor.lease()
        assert lease is not None
        finish(lease, outbox)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert await actor.lease() is None
        with pytest.raises(DeadlineError, match="the task source has ended"):
            await asyncio.wait_for(waiting, 60.0)


async def test_broken_outbox_fails_waiting_calls() -> None:
    outbox = Outbox()
    async with running(outbox) as actor:
        waiting = asyncio.create_task(actor.take(600.0))
        await asyncio.sleep(0.01)
        outbox.broken = True
        with pytest.raises(RunStoreError, match="disk gone"):
            await asyncio.wait_for(waiting, 60.0)
        with pytest.raises(RunStoreError, match="disk gone"):
            await actor.lease()
