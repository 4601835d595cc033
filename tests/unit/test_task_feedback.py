"""A task source that is told outcomes: what it is told and when, what its mistakes do,
and that a resume goes on where it was."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_buffer import failure, lease_all, make, summary, tasks
from stored_rollouts import finish as finish_session
from stored_rollouts import summary_of

from invrl.buffer.config import BufferConfig
from invrl.buffer.failures import FailureLimits, FailureReporter
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import nonzero_variance
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.process.buffer_actor import BufferActor
from invrl.errors import BufferStateError
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks.curriculum import CURRICULA, Curriculum
from invrl.store.run_store_writer import RunStoreWriter, abandon_open_sessions
from invrl.types.groups import Group, GroupOutcome
from invrl.types.metrics import resolve
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


class Told(Iterator[Task]):
    """Counts up, and skips as many tasks as rollouts were solved."""

    def __init__(self) -> None:
        self.outcomes: list[GroupOutcome] = []
        self.position = 0

    def __next__(self) -> Task:
        self.position += 1
        return Task(id=f"t{self.position}", payload={"n": self.position})

    def record(self, outcome: GroupOutcome) -> None:
        self.outcomes.append(outcome)
        self.position += outcome.num_solved


class Kept(Told):
    def state(self) -> Any:
        return {"position": self.position}

    def restore(self, state: Any) -> None:
        self.position = state["position"]


def saved_and_read(buffer: GroupBuffer, trained: int = 0) -> BufferSnapshot:
    encoded = msgspec.json.encode(buffer.snapshot(WeightVersion(trained)))
    return msgspec.json.decode(encoded, type=BufferSnapshot)


def console(buffer: GroupBuffer) -> list[str]:
    return FailureReporter(FailureLimits(identical=128, at_start=32)).texts(
        buffer.failure_report()
    )


def finish(
    buffer: GroupBuffer, group_id: str, *rewards: float, oldest: int = 0
) -> None:
    for index, reward in enumerate(rewards):
        buffer.record(
            summary(group_id, index, reward=reward, oldest=oldest, newest=oldest)
        )


# ----------------------------------------------------------------- what it is told


def test_task_source_learns_once_how_each_group_ended() -> None:
    source = Told()

    def no_ones(group: Group) -> str | None:
        if group.rollouts_G[0].reward == 1.0:
            return "begins_with_one"
        return nonzero_variance(group)

    buffer = make(staleness=1, batch=3, attempts=1, source=source, group_filter=no_ones)
    assert [lease.task.id for lease in lease_all(buffer)] == [
        "t1",
        "t2",
        "t3",
        "t4",
        "t5",
        "t6",
    ]
    finish(buffer, "g0", 0.0, 1.0)
    finish(buffer, "g1", 0.5, 0.5)
    finish(buffer, "g2", 1.0, 0.0)
    buffer.record(summary("g3", 1, reward=2.0))
    buffer.record(failure("g3", 0))
    outcomes = [
        (o.group_id, o.task_id, o.rewards_G, o.num_solved, o.complete, o.dropped)
        for o in source.outcomes
    ]
    assert outcomes == [
        ("g0", "t1", (0.0, 1.0), 1, True, ""),
        ("g1", "t2", (0.5, 0.5), 0, True, "zero_variance"),
        ("g2", "t3", (1.0, 0.0), 1, True, "filtered/begins_with_one"),
        ("g3", "t4", (2.0,), 1, False, "incomplete"),
    ]
    assert [outcome.success_rate for outcome in source.outcomes] == [0.5, 0.0, 0.5, 1.0]
    assert {outcome.version for outcome in source.outcomes} == {0}
    buffer.close()
    assert len(source.outcomes) == 4, (
        "the open groups end with the run, and no state is kept of that"
    )


def test_stale_group_is_reported_to_the_source_only_if_not_reported_before() -> None:
    source = Told()
    buffer = make(staleness=0, batch=1, over=2, source=source, when_stale="drop")
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    finish(buffer, "g1", 0.0, 1.0)
    buffer.record(summary("g2", 0, reward=0.0))
    batch = buffer.take()
    assert batch is not None
    buffer.trained(batch.batch_id)
    buffer.advance(WeightVersion(1))
    assert [(o.group_id, o.dropped, o.version) for o in source.outcomes] == [
        ("g0", "", 0),
        ("g1", "", 0),
        ("g2", "stale", 1),
    ]
    assert buffer.events.dropped == {"stale": 2}


def test_the_reward_that_counts_as_solved_is_a_setting() -> None:
    source = Told()
    buffer = GroupBuffer(
        BufferConfig(success_reward=0.25),
        RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=4),
        tasks=source,
        group_filter=lambda group: None,
    )
    lease_all(buffer)
    finish(buffer, "g0", -1.0, 0.2, 0.25, 1.0)
    assert source.outcomes[0].success_rate == 0.5
    assert (
        GroupOutcome(
            task_id="t",
            group_id="g",
            version=WeightVersion(0),
            rewards_G=(),
            num_solved=0,
            complete=False,
        ).success_rate
        is None
    )


def test_repeated_task_is_reported_under_the_sources_own_id() -> None:
    outcomes: list[str] = []

    class Always(Iterator[Task]):
        def __next__(self) -> Task:
            return Task(id="q", payload={})

        def record(self, outcome: GroupOutcome) -> None:
            outcomes.append(outcome.task_id)

    buffer = make(batch=2, source=Always())
    assert [lease.task.id for lease in lease_all(buffer)] == ["q", "q@1"]
    finish(buffer, "g1", 0.0, 1.0)
    assert outcomes == ["q"]


# ----------------------------------------------------------------- its mistakes


def test_source_whose_record_raises_is_reported_once_and_the_run_continues() -> None:
    class Raises(Told):
        def record(self, outcome: GroupOutcome) -> None:
            raise KeyError(outcome.task_id)

    buffer = make(batch=2, source=Raises())
    for group_id in ("g0", "g1"):
        lease_all(buffer)
        finish(buffer, group_id, 0.0, 1.0)
    assert buffer.take() is not None
    (text,) = console(buffer)
    assert text.startswith(
        "warning: record() of the task source failed. The run goes on"
    )
    assert "KeyError: 't1'" in text
    assert "in record: raise KeyError(outcome.task_id)" in text
    assert resolve(buffer.metrics())["task_source_record_failed"] == 2


def test_source_whose_record_exits_does_not_end_the_buffer() -> None:
    class Leaves(Told):
        def record(self, outcome: GroupOutcome) -> None:
            raise SystemExit(3)

    buffer = make(source=Leaves())
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    assert "SystemExit: 3" in console(buffer)[0]


def raises(self: Any) -> object:
    raise RuntimeError("no state today")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (raises, "raised RuntimeError: no state today"),
        (
            lambda self: {"seen": {1, 2}},
            "state()['seen'] is a set, {1, 2}, which JSON does not have",
        ),
        (
            lambda self: {1: "a"},
            "state() has the key 1, a int; JSON's keys are strings",
        ),
        (lambda self: [float("nan")], "state()[0] is nan, which JSON does not have"),
        (
            lambda self: "x" * (65 * 1024 * 1024),
            "it has 65 MiB as JSON; at most 64 are stored",
        ),
    ],
)
def test_source_whose_state_fails_does_not_fail_the_checkpoint(
    state: Callable[[Any], object], reason: str
) -> None:
    class Broken(Kept):
        pass

    Broken.state = state  # type: ignore[method-assign]
    buffer = make(batch=2, source=Broken())
    lease_all(buffer)
    finish(buffer, "g0", 0.0, 1.0)
    saved = saved_and_read(buffer)
    assert saved.feed is not None
    assert reason in saved.feed.no_state
    (text,) = console(buffer)
    assert text.startswith(
        "warning: the state of the task source is lost. The run goes on; a resume"
    )
    assert resolve(buffer.metrics())["task_source_state_failed"] == 1

    again = make(batch=2, source=Kept())
    again.restore(saved, [])
    (text,) = console(again)
    assert "begins anew and knows no outcome: its state()" in text
    assert [lease.task.id for lease in lease_all(again)] == ["t2"], (
        "the open group keeps its task"
    )
    again.advance(WeightVersion(0))


def test_fault_of_the_source_does_not_hide_that_every_rollout_fails() -> None:
    """Rollouts that were leased before the first one ended are waited for before the
    run gives up."""

    class Raises(Told):
        def record(self, outcome: GroupOutcome) -> None:
            raise KeyError

    saved = saved_and_read(make(source=Told()))
    buffer = make(batch=2, attempts=1, source=Raises())
    buffer.restore(saved, [])
    assert console(buffer), "it has been noted that there is no state"
    lease_all(buffer)
    buffer.record(failure("g0", 0))
    assert not buffer.failure_report().first_ended


def test_unstorable_task_ends_the_source_with_a_reason() -> None:
    class Odd(Told):
        def __next__(self) -> Task:
            return Task(id="t", payload={"text": "\ud800"})

    buffer = make(source=Odd())
    assert buffer.lease() is None
    end = buffer.wait_report().source_end
    assert "task t cannot be sent as JSON" in end
    assert "its checkpoints hold them" in end


def test_unusable_task_id_ends_the_source_with_a_reason() -> None:
    buffer = make(source=iter([Task(id="", payload={})]))
    assert buffer.lease() is None
    assert "yielded the task id ''" in buffer.wait_report().source_end


# ----------------------------------------------------------------- resume


def test_resume_continues_with_the_source_state_and_the_open_groups() -> None:
    first = make(staleness=1, batch=2, source=Kept())
    lease_all(first)
    finish(first, "g0", 1.0, 1.0)
    first.record(summary("g1", 0, reward=0.0))
    finish(first, "g2", 0.0, 1.0)
    saved = saved_and_read(first)
    source = Kept()
    again = make(staleness=1, batch=2, source=source)
    again.restore(saved, [])
    assert source.position == 4 + 3
    assert [lease.task for lease in lease_all(again)] == [
        Task(id="t2", payload={"n": 2}),
        Task(id="t4", payload={"n": 4}),
    ]
    again.advance(WeightVersion(0))
    batch = again.take()
    assert batch is not None
    assert [group.task_id for group in batch.groups] == ["t1", "t3"]
    again.trained(batch.batch_id)
    again.advance(WeightVersion(1))
    assert [lease.task.id for lease in lease_all(again)] == ["t8", "t9"]


def test_outcomes_after_the_checkpoint_are_reported_to_the_restored_source() -> None:
    first = make(batch=1, source=Kept())
    lease_all(first)
    saved = saved_and_read(first)
    source = Kept()
    again = make(batch=1, source=source)
    again.restore(saved, [summary("g0", 0, reward=1.0), summary("g0", 1, reward=0.0)])
    assert [(o.group_id, o.num_solved) for o in source.outcomes] == [("g0", 1)]
    assert source.position == 2


def test_source_without_state_restarts_with_a_note() -> None:
    first = make(batch=1, source=Told())
    lease_all(first)
    saved = saved_and_read(first)
    again = make(batch=1, source=Told())
    again.restore(saved, [])
    assert "it has no state() and restore()" in console(again)[0]
    (lease,) = lease_all(again)
    assert lease.task.id == "t1"
    finish(again, "g0", 0.0, 0.0)
    batch = again.take()
    assert batch is not None
    again.trained(batch.batch_id)
    again.advance(WeightVersion(1))
    assert [lease.task.id for lease in lease_all(again)] == ["t1@1"], (
        "no id comes twice"
    )


class Refuses(Kept):
    def restore(self, state: Any) -> None:
        raise ValueError("a state of another list")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            Kept,
            Refuses,
            r"restore\(\) raised ValueError: a state of another list \(at .*in restore: raise",
        ),
        (Kept, Told, r"the source has no restore\(state\) any more"),
        (
            Kept,
            tasks,
            r"the task source has no record\(\) and no state\(\), and the one that",
        ),
        (
            tasks,
            Kept,
            r"has record\(\) or state\(\), and the one that the run began with had neither",
        ),
    ],
)
def test_resume_refuses_another_kind_of_source(
    before: Callable[[], Iterator[Task]],
    after: Callable[[], Iterator[Task]],
    message: str,
) -> None:
    first = make(source=before())
    lease_all(first)
    with pytest.raises(BufferStateError, match=message):
        make(source=after()).restore(saved_and_read(first), [])


# ------------------------------------------------------- through the buffer's process


def curriculum() -> Curriculum:
    listed = [Task(id=f"q{n}", payload={"n": n}) for n in range(7)]
    return Curriculum(listed, CURRICULA["learnability"], decay=0.5, seed=3)


def make_actor(path: Path) -> BufferActor:
    return BufferActor(
        BufferConfig(difficulty={"low": 0.1, "high": 0.9}),
        RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2),
        tasks_factory=curriculum,
        run_store_path=path,
        poll_interval_s=0.0,
    )


async def play(actor: BufferActor, writer: RunStoreWriter, version: int) -> list[str]:
    """One step, up to `trained`. Returns the ids of the leased tasks, in order. No
    rollout of q2 succeeds."""
    leased: list[str] = []
    while True:
        while (lease := await actor.lease()) is not None:
            leased.append(lease.task.id)
            for member in lease.members:
                ended = summary_of(
                    lease, index=member.index, attempt=member.attempt, version=version
                )
                if lease.task.payload["n"] == 2:
                    ended = replace(ended, reward=0.0)
                finish_session(writer, ended)
            async with asyncio.timeout(120):
                while (await actor.waiting()).in_flight:
                    await asyncio.sleep(0.001)
        if len(actor._buffer.takeable()) >= 2:
            batch = await actor.take(120.0)
            await actor.trained(batch.batch_id)
            return leased


async def test_resumed_run_leases_the_tasks_of_the_uninterrupted_run(
    tmp_path: Path,
) -> None:
    """The machine stops with the checkpoint of step 3; the run is continued from there
    twice: as it was, and from what was on disk."""
    path = tmp_path / "run.sqlite"
    actor = make_actor(path)
    writer = RunStoreWriter(path)
    await actor.start()
    for step in range(3):
        await play(actor, writer, step)
        if step < 2:
            await actor.advance(WeightVersion(step + 1))
    snapshot = await actor.snapshot(WeightVersion(3))
    (tmp_path / "stopped").mkdir()
    for file in tmp_path.glob("run.sqlite*"):
        shutil.copy(file, tmp_path / "stopped" / file.name)
    decoded = msgspec.json.decode(snapshot, type=BufferSnapshot)
    assert decoded.feed is not None
    assert len(decoded.feed.state["tasks"]) > 2
    assert sum(history.num_groups for history in decoded.histories) >= 6

    stopped = tmp_path / "stopped" / "run.sqlite"
    abandon_open_sessions(stopped)
    again = make_actor(stopped)
    writer_again = RunStoreWriter(stopped)
    await again.start(snapshot)
    for step in range(3, 8):
        await actor.advance(WeightVersion(step))
        await again.advance(WeightVersion(step))
        expected = await play(actor, writer, step)
        assert await play(again, writer_again, step) == expected
    for started_actor in (actor, again):
        await started_actor.close()
    writer.close()
    writer_again.close()
