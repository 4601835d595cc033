"""Workers die and get stuck; the pool replaces them and every session still ends."""

from __future__ import annotations

import asyncio

import pytest
from fake_workers import FakeWorker, assignment, given, reasons, started_pool

from invrl.errors import ActorDiedError, PluginError, ServerError
from invrl.types.reasons import FailureReason


async def test_the_least_busy_worker_is_given_the_next_assignment():
    pool, workers, _ = await started_pool(size=2)
    runs = [asyncio.create_task(pool.run(assignment("hold-a", sessions=3)))]
    await given(workers[0], "hold-a")
    runs += [asyncio.create_task(pool.run(assignment(f"hold-{n}"))) for n in "bcd"]
    await given(workers[1], "hold-b", "hold-c", "hold-d")
    assert workers[0].given == ["hold-a"]
    for worker in workers:
        worker.release.set()
    await asyncio.gather(*runs)


async def test_worker_death_fails_only_its_own_rollouts():
    pool, workers, aborts = await started_pool(size=2)
    elsewhere = asyncio.create_task(pool.run(assignment("hold-elsewhere", sessions=2)))
    await given(workers[0], "hold-elsewhere")
    beside = asyncio.create_task(pool.run(assignment("hold-beside")))
    await given(workers[1], "hold-beside")
    assert reasons(await pool.run(assignment("die"))) == [FailureReason.WORKER_DIED]
    assert reasons(await beside) == [FailureReason.WORKER_DIED]
    assert set(aborts.seen) == {"die0", "hold-beside0"}
    assert not elsewhere.done()
    workers[0].release.set()
    assert reasons(await elsewhere) == [FailureReason.EXCEPTION] * 2
    assert len(workers) == 3
    assert pool.replaced == 1
    assert reasons(await pool.run(assignment("ok"))) == [FailureReason.EXCEPTION]


async def test_silent_worker_is_killed_and_replaced():
    pool, workers, aborts = await started_pool()
    beside = asyncio.create_task(pool.run(assignment("hold-beside")))
    await given(workers[0], "hold-beside")
    assert reasons(await pool.run(assignment("stuck"))) == [FailureReason.TIMEOUT]
    assert "event loop" in aborts.seen["stuck0"][1]
    assert reasons(await beside) == [FailureReason.WORKER_DIED]
    assert workers[0].dead.is_set()
    assert pool.replaced == 1


async def test_worker_with_a_stuck_thread_is_replaced_once_it_is_empty():
    pool, workers, aborts = await started_pool()
    running = asyncio.create_task(pool.run(assignment("hold-running")))
    await given(workers[0], "hold-running")
    await pool.run(assignment("thread"))
    assert pool.replaced == 1
    assert not workers[0].dead.is_set()
    await pool.run(assignment("ok"))
    assert workers[1].given == ["ok"]
    workers[0].release.set()
    assert reasons(await running) == [FailureReason.EXCEPTION]
    assert workers[0].dead.is_set()
    assert aborts.seen == {}


async def test_worker_over_its_memory_is_replaced_once_it_is_empty():
    pool, workers, aborts = await started_pool()
    running = asyncio.create_task(pool.run(assignment("hold-running")))
    await given(workers[0], "hold-running")
    assert reasons(await pool.run(assignment("full"))) == [FailureReason.EXCEPTION]
    assert pool.replaced == 1
    assert not workers[0].dead.is_set()
    workers[0].release.set()
    await running
    assert workers[0].dead.is_set()
    assert aborts.seen == {}


async def test_workers_always_over_their_memory_end_the_run():
    pool, workers, _ = await started_pool()

    async def rollouts_that_all_leak():
        for _ in range(100):
            await pool.run(assignment("full"))

    with pytest.raises(ServerError, match="no rollout ended in between"):
        await rollouts_that_all_leak()
    assert len(workers) < 30


async def test_repeated_worker_deaths_end_the_run_with_their_cause():
    pool, workers, _ = await started_pool()

    async def rollouts_that_all_die():
        for _ in range(100):
            await pool.run(assignment("die"))

    with pytest.raises(
        ServerError, match=r"died in a row, and no rollout ended.*exit code 1"
    ):
        await rollouts_that_all_die()
    assert len(workers) < 30


async def test_worker_deaths_between_successful_rollouts_do_not_end_the_run():
    pool, _, _ = await started_pool()
    for _ in range(40):
        await pool.run(assignment("die"))
        await pool.run(assignment("ok"))
    assert pool.replaced == 40


async def test_death_of_a_full_worker_counts_once():
    pool, workers, _ = await started_pool()
    beside = [asyncio.create_task(pool.run(assignment(f"hold-{i}"))) for i in range(64)]
    await given(workers[0], *(f"hold-{i}" for i in range(64)))
    await pool.run(assignment("die"))
    ended = await asyncio.gather(*beside)
    assert {reason for outcomes in ended for reason in reasons(outcomes)} == {
        FailureReason.WORKER_DIED
    }
    assert pool.replaced == 1


async def test_internal_error_of_the_pool_is_raised():
    pool, _, _ = await started_pool()
    with pytest.raises(ZeroDivisionError):
        await pool.run(assignment("bug"))


async def test_plugin_that_does_not_load_is_raised_at_the_start():
    class Unloadable(FakeWorker):
        async def ready(self, deadline_s):
            raise PluginError(
                field="rollout_function_path", value="a:b", reason="no", fix="yes"
            )

    with pytest.raises(PluginError):
        await started_pool(make=Unloadable)


async def test_a_worker_that_dies_while_it_starts_is_named():
    class Stillborn(FakeWorker):
        async def ready(self, deadline_s):
            raise ActorDiedError("exit code 7")

    with pytest.raises(
        ServerError, match=r"rollout worker 0 died while it was started: exit code 7"
    ):
        await started_pool(make=Stillborn)


async def test_stop_ends_all_workers():
    pool, workers, _ = await started_pool(size=3)
    pool.stop()
    assert all(worker.dead.is_set() for worker in workers)
