"""Leases on offer: each is taken once, opened once, or comes back as a failure and is
leased again."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dispatcher_parts import until
from stepped_clock import SteppedClock

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import GROUP_FILTERS
from invrl.host.processes.awake_time import AwakeClock
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.external_environments import ExternalDispatcher
from invrl.rollout.workers.session_client import SessionClient
from invrl.store.lease_store import LeaseStore
from invrl.store.rows import StoredSession
from invrl.store.run_store import RunStore
from invrl.store.run_store_writer import RunStoreWriter, abandon_open_sessions
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease, GroupMember
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task

M = GroupMember


def lease(name: str, members: int = 2) -> GroupLease:
    task = Task(id=f"task of {name}", payload={"deep": [{"a": None}]}, label=[1, "x"])
    return GroupLease(
        group_id=name,
        task=task,
        members=tuple(M(index=i, attempt=0) for i in range(members)),
    )


def test_leases_are_taken_once_and_in_order_by_any_process(tmp_path: Path) -> None:
    stores = [LeaseStore(tmp_path / "run.sqlite") for _ in range(3)]
    assert stores[0].take(1.0) is None
    offered = [lease(f"g{n}") for n in range(30)]
    for offered_lease in offered:
        stores[0].offer(offered_lease)
    assert [store.take(1.0) for store in stores] == offered[:3]
    with ThreadPoolExecutor(6) as threads:
        taken = list(threads.map(lambda n: stores[n % 3].take(1.0), range(30)))
    assert sorted(
        str(offered_lease) for offered_lease in taken if offered_lease
    ) == sorted(str(offered_lease) for offered_lease in offered[3:])
    assert taken.count(None) == 3


def opened(
    writer: RunStoreWriter, of: GroupLease, *members: GroupMember, task_id: str = ""
) -> bool:
    """Whether sessions for these members were opened on their leases."""
    sessions = [
        Session(
            id=secrets.token_hex(4),
            key="",
            base_url="",
            task_id=task_id or of.task.id,
            group_id=of.group_id,
            index=member.index,
            attempt=member.attempt,
            purpose="train",
            sampling=Sampling(),
        )
        for member in members
    ]
    records = [
        StoredSession(session=session, key_hash=session.id.encode(), opened_at=1.0)
        for session in sessions
    ]
    try:
        writer.open_sessions(records, leased=True).result(60)
    except sqlite3.IntegrityError:
        return False
    return True


def test_sessions_of_a_lease_open_all_together_and_only_once(tmp_path: Path) -> None:
    store = LeaseStore(tmp_path / "run.sqlite")
    writer = RunStoreWriter(tmp_path / "run.sqlite")
    of = lease("g", members=3)
    store.offer(of)
    first, second, third = of.members
    assert not opened(writer, of, first), "nobody has taken it"
    store.take(1.0)
    assert not opened(writer, of, first, task_id="another")
    assert not opened(writer, of, first, M(index=1, attempt=1))
    assert not opened(writer, of, first, first)
    assert opened(writer, of, first, third)
    assert not opened(writer, of, third)
    assert [
        s.session.index for s in RunStore(tmp_path / "run.sqlite").live_sessions()
    ] == [0, 2]
    assert [(f.index, f.reason) for f in store.expire(store.taken())] == [
        (1, "timeout")
    ]
    assert not opened(writer, of, second)
    store.offer(lease("h"))
    abandon_open_sessions(tmp_path / "run.sqlite")
    assert store.take(1.0) is None
    assert not RunStore(tmp_path / "run.sqlite").live_sessions()
    writer.close()


class Held:
    """The state machine as the driver holds it."""

    def __init__(self, buffer: GroupBuffer) -> None:
        self.buffer = buffer
        self.error: Exception | None = None

    async def lease(self) -> GroupLease | None:
        if self.error:
            raise self.error
        return self.buffer.lease()

    async def record(self, outcome) -> None:
        self.buffer.record(outcome)

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        await asyncio.sleep(0.01)
        return self.buffer.unwanted()


async def test_expired_lease_is_leased_again_as_a_new_attempt(tmp_path: Path) -> None:
    buffer = GroupBuffer(
        BufferConfig(),
        RolloutConfig(
            rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_attempts=2
        ),
        tasks=iter(Task(id=str(n), payload={}) for n in range(100)),
        group_filter=GROUP_FILTERS["none"],
    )
    held = Held(buffer)
    store = LeaseStore(tmp_path / "run.sqlite")
    # nothing is opened at one here
    sessions = SessionClient("http://no-gateway", env_key="k")
    clock = SteppedClock()
    offers = ExternalDispatcher(
        held,  # type: ignore[arg-type]
        store,
        RunStore(tmp_path / "run.sqlite"),
        sessions,
        timeout_s=60.0,
        awake_time=AwakeClock(clock=clock),
    )
    writer = RunStoreWriter(tmp_path / "run.sqlite")
    offers.start()
    taken = []

    def take() -> bool:
        if (taken_lease := store.take(time.time())) is not None:
            taken.append(taken_lease)
        return len(taken) == 2

    await until(take)  # as many as the bound of staleness admits
    assert [taken_lease.group_id for taken_lease in taken] == ["g0", "g1"]
    assert opened(writer, taken[1], *taken[1].members)
    writer.close()
    clock.step(7200.0)  # the driver was stopped: nobody could open a session
    await asyncio.sleep(0.3)
    assert not buffer.events.failed
    clock.pace_s = 5.0
    await until(lambda: buffer.events.failed == {"timeout": 2})
    again = []
    await until(lambda: again.append(store.take(time.time())) or again[-1] is not None)
    assert again[-1].group_id == "g0"
    assert again[-1].members == (
        M(index=0, attempt=1),
        M(index=1, attempt=1),
    )
    held.error = RuntimeError("the buffer is gone")
    with pytest.raises(RuntimeError, match="the buffer is gone"):
        await asyncio.wait_for(offers.guard(asyncio.Event().wait()), 60)
    store.offer(lease("left"))
    await offers.stop()
    assert store.take(time.time()) is None
