"""A task that is solved, or out of reach: the group filter drops every group. The run
says so, and ends with its model saved or trains what there is."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from loop_parts import EmptyBatches, FixedSteps, Notes, assemble_nothing, sync_at_once
from small_buffer import failure, lease_all, summary, tasks

from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import FailureLimits, FailureReporter
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import group_filter_function
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.errors import FilteredOutError
from invrl.observe.sinks.wait_messages import (
    MESSAGE_INTERVAL_S,
    CurrentPhase,
    Deadlines,
    report_waits,
    wait_message,
)
from invrl.rollout.config import RolloutConfig
from invrl.run.checkpoints.save_schedule import SaveSchedule
from invrl.run.loop.loop import Learner, Parts, run_loop
from invrl.store.lease_store import LeaseStore
from invrl.store.rows import StoredSession
from invrl.store.run_store import ExternalWaits, SilentSession
from invrl.store.run_store_writer import RunStoreWriter
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.metrics import resolve
from invrl.types.sessions import Sampling, Session
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion

ROLLOUT = RolloutConfig(
    rollout_batch_size=2, n_samples_per_prompt=2, rollout_max_attempts=2
)
DEADLINES = Deadlines(rollout_timeout_s=300.0, filtered_out="end")


def config(filtered_out: str = "end", batches: int | None = 3) -> BufferConfig:
    return BufferConfig.model_validate(
        {"max_filtered_batches": batches, "filtered_out": filtered_out}
    )


def buffer_of(buffer_config: BufferConfig) -> GroupBuffer:
    return GroupBuffer(
        buffer_config,
        ROLLOUT,
        tasks=tasks(),
        group_filter=group_filter_function(buffer_config.group_filter),
    )


def finish(buffer: GroupBuffer, *rewards: tuple[float, float]) -> None:
    """Groups that are leased now end with these rewards."""
    for pair in rewards:
        leased = lease_all(buffer)
        group = leased[0].group_id if leased else next(iter(buffer._in_flight))
        for index, reward in enumerate(pair):
            version = buffer.version
            buffer.record(
                summary(group, index, reward=reward, oldest=version, newest=version)
            )


def test_run_ends_after_the_set_number_of_filtered_groups_in_a_row() -> None:
    buffer = buffer_of(config())
    finish(buffer, *[(1.0, 1.0)] * 5)
    assert buffer.filtered_out == ""
    finish(buffer, (0.0, 0.0))
    assert buffer.filtered_out == (
        "the group filter nonzero_variance has dropped 6 groups in a row (rewards: 5 x all 1, 1 x all 0), so "
        "there is nothing to train on"
    )


def test_kept_group_restarts_the_count_of_filtered_groups() -> None:
    buffer = buffer_of(config())
    finish(buffer, *[(1.0, 1.0)] * 5, (0.0, 1.0), *[(1.0, 1.0)] * 5)
    assert buffer.filtered_out == ""
    assert buffer.wait_report().filtered_streak == 5
    assert buffer.wait_report().ready == 1


def test_filtered_out_train_takes_all_groups_until_the_filter_keeps_a_group() -> None:
    buffer = buffer_of(config("train"))
    finish(buffer, *[(1.0, 1.0)] * 5)
    assert buffer.take() is None
    finish(buffer, (1.0, 1.0), (1.0, 1.0))
    batch = buffer.take()
    assert batch is not None
    assert [
        [rollout.reward for rollout in group.rollouts_G] for group in batch.groups
    ] == [
        [1.0, 1.0],
        [1.0, 1.0],
    ]
    assert resolve(buffer.metrics())["groups_unfiltered"] == 2
    assert buffer.filtered_out == ""
    buffer.trained(batch.batch_id)
    buffer.advance(WeightVersion(1))
    finish(buffer, (0.0, 1.0), (1.0, 1.0))
    assert buffer.wait_report().ready == 1, "the filter is back"


def test_filtered_groups_never_end_a_run_without_a_limit() -> None:
    buffer = buffer_of(config(batches=None))
    finish(buffer, *[(1.0, 1.0)] * 100)
    assert buffer.filtered_out == ""


def test_error_in_a_group_filter_is_reported_at_once_with_its_line() -> None:
    def misspelt(group: Group) -> str | None:
        return {"keep": None}["kep"]

    buffer = GroupBuffer(config(), ROLLOUT, tasks=tasks(), group_filter=misspelt)
    finish(buffer, *[(0.0, 1.0)] * 6)
    texts = FailureReporter(FailureLimits(identical=128, at_start=32)).texts(
        buffer.failure_report()
    )
    assert len(texts) == 1
    first, error, place = texts[0].splitlines()
    assert first == "warning: the group filter failed, and its groups are dropped:"
    assert error == "    KeyError: 'kep'"
    assert "test_filtered_out.py:" in place
    assert place.endswith('in misspelt: return {"keep": None}["kep"]')
    assert "rewards: 6 x 0 to 1, filter_raised_KeyError" in buffer.filtered_out


def test_filter_error_that_cannot_be_printed_is_reported() -> None:
    class Unshowable(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def raising(group: Group) -> str | None:
        raise Unshowable

    buffer = GroupBuffer(config(), ROLLOUT, tasks=tasks(), group_filter=raising)
    finish(buffer, (0.0, 1.0))
    assert (
        "a Unshowable that cannot be shown"
        in buffer.failure_report().firsts["group_filter"]
    )


def test_error_in_a_task_source_is_reported_with_its_line() -> None:
    def broken() -> Iterator[Task]:
        yield Task(id="t", payload={})
        raise KeyError("no such file")

    buffer = GroupBuffer(
        config(), ROLLOUT, tasks=broken(), group_filter=lambda group: None
    )
    lease_all(buffer)
    text = wait_message(CurrentPhase(), buffer.wait_report(), DEADLINES)
    assert (
        "there are no more tasks: the task source raised KeyError: 'no such file' (at "
        in text
    )
    assert 'in broken: raise KeyError("no such file"))' in text


async def test_waiting_take_raises_when_all_groups_are_filtered(tmp_path: Path) -> None:
    actor = BufferActor(
        config(),
        ROLLOUT,
        tasks_factory=lambda: (Task(id=f"t{n}", payload={}) for n in itertools.count()),
        run_store_path=tmp_path / "run.sqlite",
        poll_interval_s=0.001,
    )
    await actor.start()
    waiting = asyncio.create_task(actor.take(600.0))
    for _ in range(6):
        lease = await actor.lease()
        assert lease is not None
        for index in range(2):
            await actor.record(summary(lease.group_id, index, reward=1.0))
    with pytest.raises(FilteredOutError, match="dropped 6 groups in a row"):
        await waiting
    await actor.close()


class FiltersOut(EmptyBatches):
    """After so many batches, nothing is left to train on."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self._batches = batches

    async def take(self) -> TakenBatch:
        if len(self.versions) == self._batches:
            raise FilteredOutError("the group filter has dropped 64 groups in a row")
        return await super().take()


@pytest.mark.parametrize(
    ("batches", "interval", "saved"),
    [
        (3, 0, [3]),
        (3, 3, [3]),
        (3, 2, [2, 3]),
        (0, 0, []),
    ],
)
async def test_run_ended_by_the_filter_saves_its_last_model_once(
    batches: int, interval: int, saved: list[int]
) -> None:
    observer = Notes()
    buffer = FiltersOut(batches)
    written = list[int]()

    async def save(step: int, snapshot: bytes) -> None:
        written.append(step)

    learner = Learner(
        trainer=FixedSteps([1] * 9),
        sync=sync_at_once,
        save=save,
        schedule=SaveSchedule(steps=interval),
    )
    parts = Parts(
        buffer=buffer, assemble=assemble_nothing, observer=observer, learner=learner
    )
    assert await run_loop(parts, done=0, num_steps=9) == batches
    assert written == saved
    (note,) = observer.notes
    reason = "the group filter has dropped 64 groups in a row"
    assert note.startswith(
        f"the run ends after step {batches} of 9: {reason}.\n    To go on"
    )


# ------------------------------------------------------------- what is said meanwhile


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_wait_message_is_due_every_half_minute_without_a_step() -> None:
    clock = Clock()
    phase = CurrentPhase(clock)
    said: list[float] = []
    for second in range(200):
        clock.now = 100.0 + second
        if second == 100:
            phase.step(1, {})
        if phase.is_message_due():
            said.append(second)
    assert said == [30, 60, 90, 130, 160, 190]
    assert MESSAGE_INTERVAL_S == 30


def waiting(buffer: GroupBuffer, deadlines: Deadlines = DEADLINES) -> str:
    clock = Clock()
    phase = CurrentPhase(clock)
    phase.phase("rollout", 7)
    clock.now += 62.0
    return wait_message(phase, buffer.wait_report(), deadlines)


def test_wait_message_names_a_solved_task_and_the_setting() -> None:
    buffer = buffer_of(config())
    finish(buffer, *[(1.0, 1.0)] * 4)
    text = waiting(buffer)
    assert text.startswith("step 7: rollout for 62 s: 0 of 2 groups ready, ")
    assert (
        "4 finished since the last batch, dropped: 4 zero_variance, 0 rollouts failed"
        in text
    )
    assert (
        "the filter nonzero_variance dropped the last 4 groups in a row (rewards: 4 x all 1)."
        in text
    )
    assert "the task is solved, or out of reach" in text
    assert (
        "after 6 in a row the run ends and saves its model (--max-filtered-batches, --filtered-out end)"
    ) in text


def test_wait_message_names_failures_and_running_rollouts() -> None:
    buffer = buffer_of(config())
    lease_all(buffer)
    buffer.record(failure("g0", 0))
    text = waiting(buffer)
    assert "1 rollouts failed (1 exception)" in text
    assert "no group has finished: failures are shown above" in text
    assert "group g0 (task t0) waits longest: 2 of 2 rollouts are out" in text
    assert "a rollout fails after --rollout-timeout-s 300" in text
    assert "the gate" not in text
    gated = waiting(buffer, replace(DEADLINES, has_gate=True))
    assert "does not count the time for which the gate holds its turns" in gated


def outside_text(outside: ExternalWaits, idle_s: float = 900.0) -> str:
    buffer = buffer_of(config())
    lease_all(buffer)
    clock = Clock()
    phase = CurrentPhase(clock)
    phase.phase("rollout", 1)
    deadlines = Deadlines(
        rollout_timeout_s=300.0,
        filtered_out="end",
        lease_timeout_s=60.0,
        session_idle_timeout_s=idle_s,
    )
    return wait_message(
        phase, replace(buffer.wait_report(), outside=outside), deadlines
    )


def test_wait_message_names_silent_outside_environments_and_their_deadlines() -> None:
    silent = SilentSession(session_id="ses-00ab", silent_s=80.4)
    text = outside_text(ExternalWaits(offered=0, leased=0, sessions=(silent,)))
    assert "group g0 (task t0) waits longest: 2 of 2 rollouts are out" in text
    assert (
        "with the time since their last turn: ses-00ab for 80 s; an environment that makes no call"
        in text
    )
    assert "for 900 s counts as gone (--session.idle-timeout-s)" in text
    endless = outside_text(
        ExternalWaits(offered=0, leased=0, sessions=(silent,) * 6), idle_s=0.0
    )
    assert (
        "and 2 more; an environment may be silent for as long as its session lasts"
        in endless
    )
    nobody = outside_text(ExternalWaits(offered=8, leased=2, sessions=()))
    assert (
        "8 rollouts are on offer (POST /tasks/lease) and nobody has leased them; 2 are leased"
        in nobody
    )
    assert "void after --session.lease-timeout-s 60" in nobody
    assert "on their way" in outside_text(
        ExternalWaits(offered=0, leased=0, sessions=())
    )


async def test_buffer_finds_the_silent_environment_in_the_store(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    rollout = ROLLOUT.model_copy(update={"external_environments": True})
    actor = BufferActor(
        config(),
        rollout,
        tasks_factory=lambda: (Task(id=f"t{n}", payload={}) for n in itertools.count()),
        run_store_path=path,
        poll_interval_s=0.001,
    )
    await actor.start()
    leases = LeaseStore(path)
    first = await actor.lease()
    second = await actor.lease()
    assert first is not None
    assert second is not None
    leases.offer(first)
    leases.offer(second)
    assert leases.take(time.time()) == first
    writer = RunStoreWriter(path)
    session = Session(
        id="ses-silent",
        key="k",
        base_url="",
        task_id=first.task.id,
        group_id=first.group_id,
        index=0,
        attempt=0,
        purpose="train",
        sampling=Sampling(),
    )
    opened_at = time.time() - 95.0
    record = StoredSession(session=session, key_hash=b"h", opened_at=opened_at)
    await asyncio.wrap_future(writer.open_sessions([record], leased=True))
    report = await actor.waiting()
    assert report.outside is not None
    assert report.outside.offered == 2
    assert report.outside.leased == 1
    (silent,) = report.outside.sessions
    assert silent.session_id == "ses-silent"
    assert silent.silent_s >= 95.0
    assert report.in_flight[0].group_id == first.group_id
    writer.close()
    leases.close()
    await actor.close()


def test_wait_message_of_another_phase_has_its_duration() -> None:
    clock = Clock()
    phase = CurrentPhase(clock)
    phase.phase("checkpoint", 3)
    clock.now += 31.0
    assert wait_message(phase, None, DEADLINES) == "step 3: checkpoint for 31 s"


async def test_wait_message_reads_the_buffer_in_the_rollout_phase() -> None:
    clock = Clock()
    phase = CurrentPhase(clock)
    clock.now += 155.0  # until everything was up
    phase.phase("rollout", 1)
    noted = asyncio.Event()
    notes: list[str] = []

    class Screen:
        def note(self, text: str) -> None:
            notes.append(text)
            noted.set()

    class Asked:
        async def waiting(self):
            return buffer_of(config()).wait_report()

    telling = asyncio.create_task(
        report_waits(Asked(), phase, Screen(), DEADLINES, interval_s=0.0)
    )
    try:
        for _ in range(20):
            await asyncio.sleep(0)
        assert notes == []
        clock.now += 30.0
        async with asyncio.timeout(600):
            await noted.wait()
    finally:
        telling.cancel()
        await asyncio.wait({telling})
    assert notes[0].startswith("step 1: rollout for 30 s: 0 of 2 groups ready")
