"""The actor as a plain class: the outbox is polled, takes wait and say what is
missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from small_buffer import Outbox, running_buffer
from stored_rollouts import summary_of

from invrl.errors import BufferStateError, DeadlineError, RunStoreError
from invrl.types.leases import GroupLease
from invrl.types.metrics import resolve
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


def finish(
    lease: GroupLease, outbox: Outbox, *, equal: bool = False, newest: int = 0
) -> None:
    for member in lease.members:
        summary = summary_of(
            lease, index=member.index, attempt=member.attempt, version=newest
        )
        if equal:
            summary = replace(summary, reward=0.0)
        outbox.rows.append(summary)


def one() -> Iterator[Task]:
    return iter([Task(id="only", payload={})])


async def test_outcome_from_the_outbox_wakes_a_waiting_take() -> None:
    outbox = Outbox()
    async with running_buffer(outbox) as actor:
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
    async with running_buffer(outbox, batch=1) as actor:
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
    async with running_buffer(outbox) as actor:
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
    async with running_buffer(outbox, tasks=one) as actor:
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
    async with running_buffer(outbox) as actor:
        waiting = asyncio.create_task(actor.take(600.0))
        await asyncio.sleep(0.01)
        outbox.broken = True
        with pytest.raises(RunStoreError, match="disk gone"):
            await asyncio.wait_for(waiting, 60.0)
        with pytest.raises(RunStoreError, match="disk gone"):
            await actor.lease()
