"""The buffer as a Ray actor over a real run store: handle, deadlines, errors across the
process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from stored_rollouts import finish_lease

from invrl.buffer.config import BufferConfig
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.buffer.process.buffer_handle import BufferHandle
from invrl.errors import BufferStateError, DeadlineError, ServerError
from invrl.host.ray.actor import ActorOptions, start_actor
from invrl.rollout.config import RolloutConfig
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.metrics import resolve
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
async def handle(tmp_path: Path) -> AsyncIterator[BufferHandle]:
    def endless_tasks() -> Iterator[Task]:
        return (Task(id=f"t{n}", payload={"n": n}) for n in itertools.count())

    actor = start_actor(
        "the buffer",
        BufferActor,
        ActorOptions(),
        BufferConfig(max_staleness=0),
        RolloutConfig(
            rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_attempts=2
        ),
        tasks_factory=endless_tasks,
        run_store_path=tmp_path / "run.sqlite",
    )
    handle = BufferHandle(actor=actor, batch_timeout_s=240.0)
    await handle.start()
    yield handle
    actor.kill()


async def test_buffer_actor_serves_three_steps_from_the_run_store(
    handle: BufferHandle, tmp_path: Path
) -> None:
    store = RunStoreWriter(tmp_path / "run.sqlite")
    seen: set[str] = set()
    for step in range(3):
        for _ in range(2):
            lease = await handle.lease()
            assert lease is not None
            finish_lease(store, lease, version=step)
        assert await handle.lease() is None
        batch = await handle.take()
        assert (batch.batch_id, batch.version) == (step, step)
        ids = {
            rollout.session_id for group in batch.groups for rollout in group.rollouts_G
        }
        assert len(ids) == 4
        assert not ids & seen
        seen |= ids
        await handle.trained(batch.batch_id)
        await handle.advance(WeightVersion(step + 1))
        assert resolve(await handle.metrics())["groups_trained"] == 2
    assert resolve(await handle.metrics())["rollouts_trained"] == 12
    await handle.close()
    store.close()


async def test_errors_of_the_buffer_actor_keep_their_type(handle: BufferHandle) -> None:
    impatient = BufferHandle(actor=handle.actor, batch_timeout_s=0.2)
    await impatient.lease()
    with pytest.raises(
        DeadlineError, match=r"a batch of 2 groups; 0 ready, 1 in flight"
    ):
        await impatient.take()
    with pytest.raises(BufferStateError, match="batch 7 is not out"):
        await impatient.trained(7)


async def test_silent_buffer_actor_is_a_deadline_error(handle: BufferHandle) -> None:
    silent = BufferHandle(
        actor=handle.actor, batch_timeout_s=30.0, call_timeout_s=-29.5
    )
    with pytest.raises(DeadlineError, match=r"the buffer to answer take\(\)"):
        await silent.take()


async def test_dead_buffer_actor_is_a_server_error(handle: BufferHandle) -> None:
    process = psutil.Process((await handle.actor.beat()).pid)
    handle.actor.kill()
    # on a busy machine it may answer for a while
    await asyncio.to_thread(process.wait, timeout=60)
    with pytest.raises(ServerError, match="the buffer died"):
        await handle.lease()


async def test_buffer_handle_works_in_another_ray_process(handle: BufferHandle) -> None:
    @ray.remote
    def lease(handle: BufferHandle) -> str:
        lease = asyncio.run(handle.lease())
        return lease.group_id if lease else ""

    assert await lease.remote(handle) == "g0"
