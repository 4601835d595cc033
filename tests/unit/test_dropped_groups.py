"""A group that is dropped while rollouts of it run: they are cancelled at once,
wherever they are, and nothing that they still send changes what the buffer has
decided."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import httpx
import openai
import pytest
from dispatcher_parts import HeldPool, Leases, Opener, started_dispatcher, until
from fake_workers import FakeWorker, assignment, given, reasons, started_pool
from running_gateway import ASK, ENV_KEY, Running, eventually, running
from small_buffer import Outbox, failed, finished, running_buffer

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.open_group import RolloutState
from invrl.gateway.rendering.renderer import Renderer
from invrl.rollout.config import RolloutConfig
from invrl.rollout.dispatch.external_environments import ExternalDispatcher
from invrl.rollout.workers import runner as runner_module
from invrl.rollout.workers.runner import Failure, Runner
from invrl.rollout.workers.session_client import SessionClient
from invrl.rollout.workers.worker_actor import Assignment, RolloutWorker, WorkerSettings
from invrl.store.lease_store import LeaseStore
from invrl.store.run_store import RunStore
from invrl.types.groups import DroppedGroup
from invrl.types.leases import GroupLease, Place
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout, Outcome
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

INCOMPLETE_G0 = DroppedGroup(group_id="g0", reason=DropReason.INCOMPLETE)


# ---------------------------------------------------- the state machine and its actor


def make_buffer(
    entries: list[LedgerEntry], *, attempts: int = 1, batch: int = 2
) -> GroupBuffer:
    return GroupBuffer(
        BufferConfig(max_staleness=0, when_stale="drop"),
        RolloutConfig(
            rollout_batch_size=batch,
            n_samples_per_prompt=3,
            rollout_max_attempts=attempts,
        ),
        tasks=(Task(id=f"t{n}", payload={}) for n in itertools.count()),
        group_filter=lambda group: None,
        emit=entries.append,
    )


def test_an_incomplete_group_is_named_with_its_reason_once() -> None:
    entries: list[LedgerEntry] = []
    buffer = make_buffer(entries)
    assert buffer.lease() is not None
    assert buffer.unwanted() == ()
    buffer.record(finished(Place("g0", 0, 0), reward=1.0, oldest=0, newest=0))
    buffer.record(failed(Place("g0", 1, 0)))
    assert buffer.unwanted() == (INCOMPLETE_G0,)
    assert buffer.unwanted() == ()
    before = list(entries)
    buffer.record(failed(Place("g0", 2, 0), FailureReason.GROUP_DROPPED))
    buffer.record(finished(Place("g0", 2, 0), reward=1.0, oldest=0, newest=0))
    assert entries == before
    assert {entry.place.index: entry.state for entry in entries} == dict.fromkeys(
        range(3), RolloutState.DROPPED
    )
    assert buffer.events.failed == {"timeout": 1}, "a cancelled rollout is no failure"


def test_running_stale_group_is_reported_and_an_ended_group_is_not() -> None:
    buffer = make_buffer([], batch=1, attempts=2)
    buffer.lease()
    for index in range(3):
        buffer.record(
            finished(Place("g0", index, 0), reward=float(index), oldest=0, newest=0)
        )
    assert buffer.take() is not None
    buffer.trained(0)
    buffer.advance(WeightVersion(1))
    assert buffer.unwanted() == ()
    buffer.lease()
    # begun under version 0
    buffer.record(finished(Place("g1", 0, 0), reward=1.0, oldest=0, newest=1))
    assert buffer.unwanted() == (DroppedGroup(group_id="g1", reason=DropReason.STALE),)


async def test_buffer_actor_reports_dropped_groups_at_once_and_answers_on_closing() -> (
    None
):
    async with running_buffer(Outbox()) as actor:
        lease = await actor.lease()
        assert lease is not None
        waiting = asyncio.create_task(actor.unwanted())
        await actor.record(failed(Place("g0", 0, 0)))
        assert await waiting == (INCOMPLETE_G0,)
        at_the_end = asyncio.create_task(actor.unwanted())
        await asyncio.sleep(0)
    # it would wait for 20 s otherwise
    assert await asyncio.wait_for(at_the_end, 15.0) == ()


# ----------------------------------------------------------------- the dispatcher


class DroppingPool(HeldPool):
    """Rollouts run until they are released or dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[str] = []

    async def run(self, assignment, dropped=None):
        assert dropped is not None
        ids = tuple(session.id for session in assignment.sessions)
        running = asyncio.create_task(super().run(assignment))
        drop = asyncio.create_task(dropped.wait())
        await asyncio.wait({running, drop}, return_when=asyncio.FIRST_COMPLETED)
        if dropped.is_set():
            self.dropped += ids
            self.release(*ids)
        drop.cancel()
        return await running


class SlowOpener(Opener):
    """`ending`: aborts that have begun; they end once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ending: list[str] = []
        self.details: dict[str, str] = {}
        self.may_end = asyncio.Event()
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def open(self, lease, **options):
        await self.may_open.wait()
        return await super().open(lease, **options)

    async def abort(self, session, reason, detail):
        self.ending.append(session.id)
        self.details[session.id] = detail
        await self.may_end.wait()
        await super().abort(session, reason, detail)


@pytest.mark.parametrize("group_form", [False, True])
async def test_sessions_of_a_dropped_group_are_aborted_before_its_rollouts_are_cancelled(
    group_form: bool,
):
    buffer = Leases(groups=3, size=2)
    opener = SlowOpener()
    pool = DroppingPool()
    dispatcher = started_dispatcher(
        buffer, opener, pool, concurrency=2, group_form=group_form
    )
    await until(lambda: dispatcher.running == 2)
    buffer.dropped.put_nowait(INCOMPLETE_G0)
    await until(lambda: len(opener.ending) == 2)
    assert pool.dropped == [], "cancelled before its session was aborted"
    opener.may_end.set()
    await until(
        lambda: {one for ids in pool.running for one in ids} == {"g1/0", "g1/1"}
    )
    assert sorted(pool.dropped) == ["g0/0", "g0/1"]
    assert opener.aborted == dict.fromkeys(
        ["g0/0", "g0/1"], FailureReason.GROUP_DROPPED
    )
    assert set(opener.details.values()) == {
        "group g0 was dropped (incomplete): this rollout is no longer needed"
    }
    await dispatcher.stop()


async def test_waiting_rollouts_of_a_dropped_group_never_run():
    buffer = Leases(groups=3, size=2)
    opener = SlowOpener()
    pool = DroppingPool()
    opener.may_end.set()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=3)
    # the fourth waits
    await until(lambda: len(pool.running) == 3 and len(opener.opened) == 4)
    buffer.dropped.put_nowait(DroppedGroup(group_id="g1", reason=DropReason.STALE))
    await until(lambda: ("g2/0",) in pool.running)
    assert opener.aborted == dict.fromkeys(
        ["g1/0", "g1/1"], FailureReason.GROUP_DROPPED
    )
    assert pool.calls == [("g0/0",), ("g0/1",), ("g1/0",), ("g2/0",)]
    await dispatcher.stop()


async def test_group_dropped_while_its_sessions_open_never_runs():
    buffer = Leases(groups=2, size=2)
    opener = SlowOpener()
    pool = DroppingPool()
    opener.may_end.set()
    opener.may_open.clear()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=2)
    await until(lambda: buffer.asked == 1)
    buffer.dropped.put_nowait(INCOMPLETE_G0)
    await until(lambda: "g0" in dispatcher._dropped)
    opener.may_open.set()
    await until(lambda: len(pool.running) == 2)
    assert pool.calls == [("g1/0",), ("g1/1",)]
    assert opener.aborted == dict.fromkeys(
        ["g0/0", "g0/1"], FailureReason.GROUP_DROPPED
    )
    await dispatcher.stop()


async def test_drop_of_a_group_that_has_ended_changes_nothing():
    buffer = Leases(groups=1, size=1)
    opener = SlowOpener()
    pool = DroppingPool()
    dispatcher = started_dispatcher(buffer, opener, pool, concurrency=2)
    await until(lambda: len(pool.running) == 1)
    pool.release("g0/0")
    await until(lambda: not dispatcher.running)
    buffer.dropped.put_nowait(INCOMPLETE_G0)
    await until(lambda: "g0" in dispatcher._dropped or buffer.dropped.empty())
    await dispatcher.stop()
    assert opener.ending == []


# ------------------------------------------------------------ the pool and the worker


class DroppableWorker(FakeWorker):
    """Knows an assignment only from the second question on, as a worker whose `run` has
    not begun yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[str] = []

    async def drop(self, assignment: Assignment, deadline_s: float) -> bool:
        self.asked.append(assignment.task.id)
        if len(self.asked) > 1:
            self.release.set()
        return len(self.asked) > 1


async def test_pool_repeats_a_cancellation_until_the_worker_knows_the_rollout() -> None:
    pool, workers, aborts = await started_pool(make=DroppableWorker)
    dropped = asyncio.Event()
    run = asyncio.create_task(pool.run(assignment("hold-a"), dropped))
    await given(workers[0], "hold-a")
    assert workers[0].asked == []
    dropped.set()
    assert reasons(await run) == [FailureReason.EXCEPTION]
    assert workers[0].asked == ["hold-a", "hold-a"]
    assert pool.replaced == 0
    assert aborts.seen == {}


async def test_a_rollout_dropped_while_its_worker_starts_never_runs() -> None:
    may_start = asyncio.Event()

    class Starting(DroppableWorker):
        async def ready(self, deadline_s: float) -> None:
            if self.name != "rollout worker 0":
                await may_start.wait()

    pool, workers, aborts = await started_pool(make=Starting)
    await pool.run(assignment("die"))
    dropped = asyncio.Event()
    run = asyncio.create_task(pool.run(assignment("hold-a"), dropped))
    await asyncio.sleep(0)
    dropped.set()
    may_start.set()
    assert reasons(await run) == [FailureReason.GROUP_DROPPED]
    assert aborts.seen["hold-a0"][0] is FailureReason.GROUP_DROPPED
    assert workers[1].given == []


async def test_worker_that_dies_during_a_cancellation_is_replaced() -> None:
    class Dying(DroppableWorker):
        async def drop(self, assignment: Assignment, deadline_s: float) -> bool:
            self.kill()
            return await super().drop(assignment, deadline_s)

    pool, workers, _ = await started_pool(make=Dying)
    dropped = asyncio.Event()
    beside = asyncio.create_task(pool.run(assignment("hold-a")))
    run = asyncio.create_task(pool.run(assignment("hold-b"), dropped))
    await given(workers[0], "hold-a", "hold-b")
    dropped.set()
    assert reasons(await run) == [FailureReason.WORKER_DIED]
    assert reasons(await beside) == [FailureReason.WORKER_DIED]
    assert pool.replaced == 1


class Address:
    base_url = "http://127.0.0.1:8000/s/key/v1"
    api_key = "key"
    model = "m"


async def dropped_run(
    function: Callable[..., object], began: Callable[[], bool], reward: object = None
) -> tuple[Runner, list[object]]:
    runner = Runner(function, reward, timeout_s=600.0)  # type: ignore[arg-type]
    dropped = asyncio.Event()
    run = asyncio.create_task(
        runner.run(Task(id="t", payload={}), [Address()], dropped)  # type: ignore[list-item]
    )
    await until(began)
    dropped.set()
    return runner, list(await asyncio.wait_for(run, 300.0))


async def test_async_rollout_function_is_cancelled_at_its_await() -> None:
    began = asyncio.Event()
    cancelled = asyncio.Event()

    async def rollout(task: Task, endpoint: object) -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 1.0

    runner, [outcome] = await dropped_run(rollout, began.is_set)
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.GROUP_DROPPED
    assert "its group was dropped; it was at" in outcome.detail
    assert cancelled.is_set()
    assert runner.stuck_threads == 0


@pytest.mark.parametrize("part", ["function", "reward"])
async def test_thread_that_ends_within_its_grace_keeps_its_worker(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is closed: its next call fails, and it ends. Here that call comes
    once the run's task has been cancelled."""
    monkeypatch.setattr(runner_module, "_DROP_GRACE_S", 300.0)
    began = threading.Event()
    may_fail = threading.Event()

    def refused(*_: object) -> float:
        began.set()
        may_fail.wait()
        raise ConnectionError("401: the session is aborted")

    async def plain(*_: object) -> float:
        return 1.0

    cancelling = runner_module._cancel

    async def cancelled(work):
        where = await cancelling(work)
        may_fail.set()
        return where

    monkeypatch.setattr(runner_module, "_cancel", cancelled)
    function, reward = (refused, None) if part == "function" else (plain, refused)
    runner, [outcome] = await dropped_run(function, began.is_set, reward)
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.GROUP_DROPPED
    assert runner.stuck_threads == 0


async def test_thread_within_its_grace_is_not_counted_as_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "_DROP_GRACE_S", 300.0)
    began = threading.Event()
    may_fail = threading.Event()
    cancelling = runner_module._cancel
    in_grace = asyncio.Event()

    def refused_or_done(task: Task, endpoint: object) -> float:
        if task.id == "done":
            return 1.0
        began.set()
        may_fail.wait()
        raise ConnectionError("401: the session is aborted")

    async def cancelled(work):
        where = await cancelling(work)
        in_grace.set()
        return where

    monkeypatch.setattr(runner_module, "_cancel", cancelled)
    runner = Runner(refused_or_done, None, timeout_s=600.0)
    dropped = asyncio.Event()
    endpoints = [Address()]
    late = asyncio.create_task(
        runner.run(Task(id="late", payload={}), endpoints, dropped)
    )  # type: ignore[arg-type]
    await until(began.is_set)
    dropped.set()
    await asyncio.wait_for(in_grace.wait(), 300.0)
    await runner.run(Task(id="done", payload={}), endpoints)  # type: ignore[arg-type]
    assert runner.stuck_threads == 0
    assert not late.done()
    may_fail.set()
    await asyncio.wait_for(late, 300.0)
    assert runner.stuck_threads == 0


async def test_thread_that_runs_past_its_grace_is_counted_as_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "_DROP_GRACE_S", 0.2)
    began = threading.Event()
    release = threading.Event()

    def hangs(*_: object) -> float:
        began.set()
        release.wait()
        return 1.0

    runner, [outcome] = await dropped_run(hangs, began.is_set)
    assert isinstance(outcome, Failure)
    assert outcome.reason is FailureReason.GROUP_DROPPED
    assert "its thread goes on, at" in outcome.detail
    assert runner.stuck_threads == 1
    release.set()
    await until(lambda: runner.stuck_threads == 0)


BEGAN = asyncio.Event()


async def waits(task: Task, endpoint: object) -> float:
    BEGAN.set()
    await asyncio.Event().wait()
    return 1.0


# -------------------------------------------------------------- with the real gateway


@pytest.fixture
async def gateway(
    tmp_path: Path, model: Path, renderer: Renderer
) -> AsyncIterator[Running]:
    async with running(tmp_path, model, renderer, leases=True) as gateway:
        yield gateway


class Held:
    """The state machine as the driver holds it."""

    def __init__(self, buffer: GroupBuffer) -> None:
        self.buffer = buffer

    async def lease(self) -> GroupLease | None:
        return self.buffer.lease()

    async def record(self, outcome: Outcome) -> None:
        self.buffer.record(outcome)

    async def unwanted(self) -> tuple[DroppedGroup, ...]:
        await asyncio.sleep(0.005)
        return self.buffer.unwanted()


@contextlib.asynccontextmanager
async def offering(
    gateway: Running, folder: Path, entries: list[LedgerEntry]
) -> AsyncIterator[GroupBuffer]:
    buffer = make_buffer(entries, batch=1)
    path = folder / "run.db"
    offers = ExternalDispatcher(
        Held(buffer),  # type: ignore[arg-type]
        LeaseStore(path),
        RunStore(path),
        SessionClient(gateway.url, env_key=ENV_KEY),
        timeout_s=600.0,
    )
    offers.start()
    yield buffer
    await offers.stop()


async def leased(gateway: Running) -> Mapping[str, object]:
    while (
        lease := (await gateway.env("/tasks/lease", {"wait_s": 1.0})).json()["lease"]
    ) is None:
        pass
    return lease


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_outside_environment_learns_that_its_group_was_dropped(
    gateway: Running, tmp_path: Path
) -> None:
    """Member 0 is generating, member 1 waits for its environment, member 2 was leased
    and never opened; then member 1 fails for good."""
    entries: list[LedgerEntry] = []
    async with offering(gateway, tmp_path, entries) as buffer:
        lease = await leased(gateway)
        assert lease["group_id"] == "g0"
        opened = {"task_id": "t0", "group_id": "g0"}
        mine, failing = await gateway.open(members=2, **opened)
        [child] = (
            await gateway.env(f"/sessions/{mine.id}/children", {}, key=mine.key)
        ).json()["sessions"]
        gateway.engine.holds = lambda _: True
        chat = gateway.client(mine).chat.completions
        call = asyncio.create_task(chat.create(model="tiny", messages=[ASK]))
        await eventually(lambda: gateway.engine.running)
        buffer.record(failed(Place("g0", failing.index, 0)))
        with pytest.raises(openai.AuthenticationError):
            await asyncio.wait_for(call, 300)
        await eventually(lambda: not gateway.engine.running)
        await eventually(lambda: len(gateway.store.outbox_after(0)) == 2)
        why = "group g0 was dropped (incomplete): this rollout is no longer needed"
        for session_key in (mine.key, failing.key, child["key"]):
            body = {"model": "tiny", "messages": [ASK]}
            late = await gateway.env("/v1/chat/completions", body, key=session_key)
            assert error(late) == (401, "group_dropped")
            assert late.json()["error"]["message"] == f"the session is aborted: {why}"
        rewarded = await gateway.env(
            f"/sessions/{mine.id}/reward", {"reward": 1.0}, key=mine.key
        )
        assert error(rewarded) == (409, "group_dropped")
        assert why in rewarded.json()["error"]["message"]
        outcome = await gateway.finish(mine)
        assert isinstance(outcome, FailedRollout)
        assert outcome.reason == FailureReason.GROUP_DROPPED
        assert outcome.detail == why
        too_late = await gateway.env(
            "/sessions", {**opened, "members": [{"index": 2, "attempt": 0}]}
        )
        assert error(too_late) == (409, "not_leased")
        for _, handed_over in gateway.store.outbox_after(0):
            before = len(entries)
            buffer.record(handed_over)
            assert len(entries) == before
        assert (await leased(gateway))["group_id"] == "g1"


async def test_group_dropped_while_it_is_offered_is_withdrawn(
    gateway: Running, tmp_path: Path
) -> None:
    offered = threading.Event()
    may_offer = threading.Event()
    leases = LeaseStore(tmp_path / "run.db")
    offer = leases.offer

    def slow_offer(lease: GroupLease) -> None:
        if lease.group_id == "g0":
            offered.set()
            may_offer.wait()
        offer(lease)

    leases.offer = slow_offer  # type: ignore[method-assign]
    buffer = Leases(groups=2, size=2)
    offers = ExternalDispatcher(
        buffer,  # type: ignore[arg-type]
        leases,
        RunStore(tmp_path / "run.db"),
        SessionClient(gateway.url, env_key=ENV_KEY),
        timeout_s=600.0,
    )
    offers.start()
    await until(offered.is_set)
    buffer.dropped.put_nowait(INCOMPLETE_G0)
    await until(lambda: "g0" in offers._dropped and not offers._drops)
    may_offer.set()
    # until then an environment may take it, which cannot open it
    await until(lambda: buffer.asked > 1)
    assert (await leased(gateway))["group_id"] == "g1"
    await offers.stop()


async def test_cancelled_worker_reports_its_rollout_and_is_free(
    gateway: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way of one cancelled rollout: its session is aborted, its function
    cancelled, and the report is the session's own end."""
    monkeypatch.setitem(globals(), "BEGAN", asyncio.Event())
    [session] = await gateway.open(purpose="eval")
    config = RolloutConfig(
        rollout_function_path=f"{__name__}:waits", rollout_timeout_s=600.0
    )
    settings = WorkerSettings(gateway_url=gateway.url, model="tiny", rollout=config)
    worker = RolloutWorker(settings)
    await worker.ready()
    work = Assignment(task=Task(id="t", payload={}), sessions=(session,))
    assert not await worker.drop(session.id)
    run = asyncio.create_task(worker.run(work))
    await eventually(BEGAN.is_set)
    client = SessionClient(gateway.url)
    await client.abort(session, FailureReason.GROUP_DROPPED, "why")
    assert await worker.drop(session.id)
    reply = await asyncio.wait_for(run, 300.0)
    [outcome] = reply.outcomes
    assert isinstance(outcome, FailedRollout)
    assert outcome.reason == FailureReason.GROUP_DROPPED
    assert outcome.detail == "why"
    assert reply.stuck_threads == 0
    assert not await worker.drop(session.id)
    await client.close()
