"""The scheduling core, with a scripted buffer, opener and pool: full slots, no hole,
named failures."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from dispatcher_parts import HeldPool, Leases, Opener, started_dispatcher, until

from invrl.errors import SessionError
from invrl.rollout.dispatch import dispatcher as module
from invrl.rollout.dispatch.dispatcher import Dispatcher
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout


async def test_freed_slot_is_refilled_at_once():
    buffer = Leases(groups=3)
    opener = Opener()
    pool = HeldPool()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=6)
    await until(lambda: len(pool.running) == 6 and len(opener.opened) == 8)
    await asyncio.sleep(0.05)
    assert dispatcher.running == 6
    assert len(pool.running) == 6
    # The second group is opened, half of it waits; the third is not leased.
    assert len(opener.opened) == 8
    assert len(buffer.left) == 1
    pool.release("g0/1")
    await until(lambda: ("g1/2",) in pool.running)
    pool.release("g0/2")
    pool.release("g0/3")
    await until(lambda: ("g2/0",) in pool.running)
    assert pool.most == 6
    await dispatcher.stop()


async def test_every_leased_rollout_runs_once():
    buffer = Leases(groups=20)
    opener = Opener()
    pool = HeldPool()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=5)
    for _ in range(80):
        await until(lambda: pool.running)
        released = next(iter(pool.running))
        pool.release(*released)
        await until(lambda released=released: released not in pool.running)
    await until(lambda: not dispatcher.running and len(pool.calls) == 80)
    assert sorted(pool.calls) == sorted(
        (f"g{g}/{i}",) for g in range(20) for i in range(4)
    )
    await dispatcher.stop()
    assert opener.aborted == {}


async def test_number_of_slots_follows_the_load(monkeypatch: pytest.MonkeyPatch):
    """Rollouts that run beyond a lower number end by themselves."""
    monkeypatch.setattr(module, "_ADAPT_S", 0.01)
    pool = HeldPool()
    limits = [2]
    seen = []

    def adapt(running: int) -> int:
        seen.append(running)
        return limits[-1]

    dispatcher = started_dispatcher(
        Leases(groups=5), Opener(), pool, concurrency=2, adapt=adapt
    )
    await until(lambda: len(pool.running) == 2)
    limits.append(6)
    await until(lambda: len(pool.running) == 6)
    limits.append(1)
    num_seen = len(seen)
    await until(lambda: len(seen) > num_seen + 2)
    assert len(pool.running) == 6
    for ids in list(pool.running)[:4]:
        pool.release(*ids)
    await until(lambda: seen[-1] == 2)
    num_seen = len(seen)
    await until(lambda: len(seen) > num_seen + 2)
    assert len(pool.running) == 2
    await dispatcher.stop()
    num_seen = len(seen)
    await asyncio.sleep(0.05)
    assert len(seen) == num_seen


async def test_adaptation_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_ADAPT_S", 0.01)

    def adapt(running: int) -> int:
        raise ZeroDivisionError

    dispatcher = started_dispatcher(
        Leases(groups=1), Opener(), HeldPool(), concurrency=1, adapt=adapt
    )
    with pytest.raises(ZeroDivisionError):
        await dispatcher.guard(asyncio.sleep(60))
    await dispatcher.stop()


async def test_group_function_gets_all_its_sessions_even_beyond_the_slots():
    buffer = Leases(groups=2)
    pool = HeldPool()
    dispatcher = started_dispatcher(
        buffer, Opener(), pool, concurrency=3, group_form=True
    )
    first = tuple(f"g0/{i}" for i in range(4))
    await until(lambda: first in pool.running)
    await asyncio.sleep(0.03)
    assert list(pool.running) == [first]
    pool.release(*first)
    await until(lambda: tuple(f"g1/{i}" for i in range(4)) in pool.running)
    await dispatcher.stop()


async def test_idle_buffer_is_polled_slowly_and_new_work_is_found_soon(monkeypatch):
    """What passes between two looks is what the dispatcher (and nobody else: other
    tests' engines are looked at in this loop) asks the event loop for."""
    buffer = Leases(groups=0)
    pool = HeldPool()
    pauses = []
    noting = {
        "timeout": lambda seconds: pauses.append(seconds) or asyncio.timeout(seconds)
    }
    monkeypatch.setattr(
        module, "asyncio", SimpleNamespace(**{**vars(asyncio), **noting})
    )
    dispatcher = started_dispatcher(buffer, Opener(), pool, concurrency=4)
    await until(lambda: buffer.asked > 8)
    assert set(pauses) == {0.04}
    assert buffer.asked <= len(pauses) + 1
    buffer.left = Leases(groups=1).left
    await until(lambda: len(pool.running) == 4)
    await dispatcher.stop()


class BrokenBuffer:
    async def lease(self):
        raise ConnectionError("the buffer actor is gone")

    async def unwanted(self):
        raise ConnectionError("the buffer actor is gone")


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ((BrokenBuffer(), Opener(), HeldPool()), ConnectionError),
        (
            (Leases(1), Opener(SessionError("no", status=401, code="x")), HeldPool()),
            SessionError,
        ),
        ((Leases(1), Opener(), HeldPool(RuntimeError("a bug"))), RuntimeError),
    ],
)
async def test_internal_error_ends_the_wait_for_a_batch(parts, cause):
    dispatcher = started_dispatcher(*parts, concurrency=4)
    cancelled = asyncio.Event()

    async def take():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(cause):
        await asyncio.wait_for(dispatcher.guard(take()), 60.0)
    await asyncio.wait_for(cancelled.wait(), 60.0)
    await dispatcher.stop()


async def test_dispatcher_failure_ends_the_work_that_started_it():
    opener = Opener()
    pool = HeldPool()
    dispatcher = Dispatcher(
        BrokenBuffer(), opener, pool, concurrency=4, group_form=False
    )

    async def starts():
        dispatcher.start()
        await asyncio.Event().wait()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(dispatcher.guard(starts()), 60.0)
    await dispatcher.stop()


async def test_guarded_call_returns_its_result():
    dispatcher = started_dispatcher(Leases(0), Opener(), HeldPool(), concurrency=4)
    assert await dispatcher.guard(asyncio.sleep(0, "batch")) == "batch"

    async def fails():
        raise KeyError("its own")

    with pytest.raises(KeyError):
        await dispatcher.guard(fails())
    await dispatcher.stop()


async def test_stopping_the_dispatcher_aborts_open_sessions():
    buffer = Leases(groups=2)
    opener = Opener()
    pool = HeldPool()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=3)
    await until(lambda: len(pool.running) == 3)
    await dispatcher.stop()
    assert not pool.running
    assert opener.aborted == {f"g0/{i}": FailureReason.ABORTED for i in range(4)}
    assert len(buffer.left) == 1


async def test_dispatcher_stops_even_if_the_buffer_swallows_the_cancellation():
    asked = asyncio.Event()
    followed = asyncio.Event()

    class Swallowing:
        async def lease(self):
            try:
                asked.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return None

        async def unwanted(self):
            try:
                followed.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return ()

    dispatcher = started_dispatcher(Swallowing(), Opener(), HeldPool(), concurrency=1)
    await asked.wait()
    await followed.wait()
    await asyncio.wait_for(dispatcher.stop(), 60.0)


async def test_rollout_with_only_forced_replies_is_reported_once_on_the_console(
    capsys: pytest.CaptureFixture[str],
):
    """It will be so in every rollout; the failures' log is not read until the run has
    waited in vain."""

    def failed(number: int) -> FailedRollout:
        return FailedRollout(
            session_id=f"g{number}/0",
            task_id="t",
            group_id=f"g{number}",
            index=0,
            attempt=0,
            reason=FailureReason.CONSTRAINED,
            detail="all turns constrained: the client sends tool_choice=required",
        )

    class Pool(HeldPool):
        async def run(self, assignment, dropped=None):
            self.calls.append(assignment)
            return (failed(len(self.calls)),)

    pool = Pool()
    dispatcher = started_dispatcher(
        Leases(groups=3, size=1), Opener(), pool, concurrency=1
    )
    await until(lambda: len(pool.calls) == 3 and not dispatcher.running)
    await dispatcher.stop()
    printed = capsys.readouterr().out
    assert (
        printed.count("all turns constrained: the client sends tool_choice=required")
        == 1
    )
    assert printed.startswith("warning: rollout g1/0 trains nothing")
