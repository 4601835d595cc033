"""Random lives of the buffer: leases, outcomes in any order and repeated, failures,
equal rewards, weight updates that span rollouts, restarts. After every step the
invariants hold, and from wherever it stands a run whose rollouts succeed gets its
batch. The tasks are of a plain source, or of one that is told outcomes and picks by
them; the group filter sees the history of each task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from small_buffer import failed, finished

from invrl.buffer.config import BufferConfig
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import group_filter_function
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.open_group import RolloutState
from invrl.rollout.config import RolloutConfig
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group, GroupOutcome, TaskHistory
from invrl.types.leases import GroupLease, Place
from invrl.types.metrics import Sum
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.rollouts import FailedRollout, RolloutSummary, SampledSoFar
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


def endless_tasks() -> Iterator[Task]:
    return (Task(id=f"t{n}", payload={}) for n in itertools.count())


class ToldTasks:
    """Five tasks that come back. Which one comes next depends on every outcome so far,
    so a source that is read again, or that misses an outcome over a restart, gives
    others."""

    def __init__(self) -> None:
        self.picks = 0
        self.solved = 0
        self.told: list[list[object]] = []

    def __iter__(self) -> ToldTasks:
        return self

    def __next__(self) -> Task:
        self.picks += 1
        return Task(
            id=f"t{(self.picks * 3 + self.solved + len(self.told)) % 5}",
            payload={"pick": self.picks},
        )

    def record(self, outcome: GroupOutcome) -> None:
        self.solved += outcome.num_solved
        self.told.append(
            [
                outcome.group_id,
                outcome.task_id,
                list(outcome.rewards_G),
                outcome.dropped,
            ]
        )

    def state(self) -> dict[str, object]:
        return {
            "picks": self.picks,
            "solved": self.solved,
            "told": self.told,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.picks = state["picks"]
        self.solved = state["solved"]
        self.told = state["told"]


class BufferMachine(RuleBasedStateMachine):
    """The model beside the buffer: who is in flight since which version, and every
    ledger entry."""

    @initialize(
        staleness=st.sampled_from([0, 1, 3]),
        batch=st.integers(1, 3),
        group=st.integers(1, 3),
        attempts=st.integers(1, 3),
        over=st.integers(0, 2),
        is_told=st.booleans(),
    )
    def begin(
        self,
        staleness: int,
        batch: int,
        group: int,
        attempts: int,
        over: int,
        is_told: bool,
    ) -> None:
        self.is_told = is_told
        self.source = ToldTasks()
        self.leased_task: dict[str, Task] = {}
        """By group id. A group that is leased again has the task that it had, over
        restarts too."""
        self.seen_histories: dict[str, TaskHistory] = {}
        """By group id: the history that the filter was shown when it judged the
        group."""
        self.staleness = staleness
        self.batch_size = batch
        self.group_size = group
        self.max_attempts = attempts
        self.over = over
        self.entries: list[LedgerEntry] = []
        self.buffer = self.new_buffer()
        self.version = 0
        self.in_flight: dict[Place, int] = {}
        self.recorded: list[RolloutSummary | FailedRollout] = []
        self.batch: TakenBatch | None = None
        self.trained_now = False
        self.ever_taken: set[Place] = set()
        self.named: set[str] = set()
        """Groups that the buffer no longer wants."""

    def new_buffer(self) -> GroupBuffer:
        self.source = ToldTasks()
        without_variance = group_filter_function(
            "nonzero_variance" if self.group_size > 1 else "none"
        )

        def looks_back(group: Group, *, history: TaskHistory) -> str | None:
            self.seen_histories[group.id] = history
            return without_variance(group)  # type: ignore[call-arg]

        return GroupBuffer(
            BufferConfig(max_staleness=self.staleness, over_sampling_groups=self.over),
            RolloutConfig(
                rollout_batch_size=self.batch_size,
                n_samples_per_prompt=self.group_size,
                rollout_max_attempts=self.max_attempts,
            ),
            tasks=self.source if self.is_told else endless_tasks(),
            # with one rollout a group has no variance, ever
            group_filter=looks_back,
            emit=self.entries.append,
        )

    # ------------------------------------------------------------ what the model knows

    def note_lease(self, lease: GroupLease) -> None:
        for member in lease.members:
            place = Place(lease.group_id, member.index, member.attempt)
            assert place not in self.in_flight
            assert place.group_id not in self.named, "leased although it is not wanted"
            assert member.attempt < self.max_attempts
            self.in_flight[place] = self.version
        assert self.leased_task.setdefault(lease.group_id, lease.task) == lease.task, (
            "another task"
        )
        assert len({task.id for task in self.leased_task.values()}) == len(
            self.leased_task
        )

    def send(self, outcome: RolloutSummary | FailedRollout) -> None:
        self.recorded.append(outcome)
        self.buffer.record(outcome)

    def note_batch(self, batch: TakenBatch) -> None:
        assert len(batch.groups) == self.batch_size
        assert batch.version == self.version
        for group in batch.groups:
            assert [rollout.index for rollout in group.rollouts_G] == list(
                range(self.group_size)
            )
            if self.group_size > 1:
                assert len({rollout.reward for rollout in group.rollouts_G}) > 1
            for rollout in group.rollouts_G:
                place = Place(group.id, rollout.index, rollout.attempt)
                assert place not in self.ever_taken, "in two batches"
                self.ever_taken.add(place)
                assert self.version - rollout.oldest_version <= self.staleness, (
                    "too stale"
                )
                assert rollout.newest_version <= self.buffer.version, (
                    "its canary has not passed"
                )
        self.batch = batch
        self.trained_now = False

    # --------------------------------------------------------------- what may happen

    @rule(times=st.integers(1, 6))
    def lease(self, times: int) -> None:
        for _ in range(times):
            lease = self.buffer.lease()
            if lease is None:
                return
            self.note_lease(lease)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]), times=st.integers(1, 4))
    def finish(self, data: st.DataObject, reward: float, times: int) -> None:
        """A rollout holds tokens from the version it began under up to the one it ended
        under."""
        for place in data.draw(st.permutations(sorted(self.in_flight, key=str)))[
            :times
        ]:
            started = self.in_flight.pop(place)
            self.send(
                finished(place, reward=reward, oldest=started, newest=self.version)
            )

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), reason=st.sampled_from(list(FailureReason)))
    def fail(self, data: st.DataObject, reason: FailureReason) -> None:
        place = data.draw(st.sampled_from(sorted(self.in_flight, key=str)))
        del self.in_flight[place]
        self.send(failed(place, reason))

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def repeat_an_outcome(self, data: st.DataObject) -> None:
        before = len(self.entries)
        self.buffer.record(data.draw(st.sampled_from(self.recorded)))
        assert len(self.entries) == before

    @rule(data=st.data())
    def cancel_what_is_not_wanted(self, data: st.DataObject) -> None:
        """Each group is named once, and every place of it has ended. What its cancelled
        rollouts, or those that ended just before, still send changes nothing."""
        groups = self.buffer.unwanted()
        assert self.buffer.unwanted() == ()
        before = len(self.entries)
        for group in groups:
            assert group.group_id not in self.named, "named twice"
            self.named.add(group.group_id)
            running = [
                place for place in self.in_flight if place.group_id == group.group_id
            ]
            assert all(
                self.last[place].state is RolloutState.DROPPED for place in running
            )
            cut_off = [
                place
                for place, entry in self.last.items()
                if place.group_id == group.group_id and entry.reason is group.reason
            ]
            assert cut_off, "nothing of it was dropped with it"
            for place in running:
                started = self.in_flight.pop(place)
                if data.draw(st.booleans()):
                    self.send(failed(place, FailureReason.GROUP_DROPPED))
                else:
                    self.send(
                        finished(place, reward=1.0, oldest=started, newest=self.version)
                    )
        assert len(self.entries) == before
        for place in self.in_flight:
            assert self.last[place].state is RolloutState.IN_FLIGHT, (
                "it runs on and is not wanted"
            )

    @rule(data=st.data())
    def look_at_what_runs(self, data: st.DataObject) -> None:
        """What rollouts that run have sampled so far, each at its lease's version or a
        newer one, is told for all suspects. A group is dropped exactly when such a
        version is too old."""
        suspects = set(self.buffer.suspects())
        running = {
            place: started
            for place, started in self.in_flight.items()
            if self.wanted(place)
        }
        sampled = {
            place: data.draw(st.integers(started, self.version))
            for place, started in running.items()
        }
        too_old = {
            place.group_id
            for place, oldest in sampled.items()
            if self.version - oldest > self.staleness
        }
        assert too_old <= suspects, "nobody would look"
        earlier = {
            place: max(0, place.attempt - 1) for place in sampled if place.attempt
        }
        reports = [
            (Place(place.group_id, place.index, attempt), 0)
            for place, attempt in earlier.items()
        ]
        reports += sampled.items()
        stale_before = self.buffer.events.dropped["stale"]
        self.buffer.note_sampled(
            SampledSoFar(place=place, oldest_version=WeightVersion(oldest))
            for place, oldest in reports
        )
        assert self.buffer.events.dropped["stale"] == stale_before + len(too_old)
        self.every_place_moves_forward_and_ends_once()
        for place in running:
            dropped = self.last[place].state is RolloutState.DROPPED
            assert dropped == (place.group_id in too_old)

    def wanted(self, place: Place) -> bool:
        """It is in flight for the buffer too: its group has not been dropped."""
        return self.last[place].state is RolloutState.IN_FLIGHT

    @rule()
    def an_outcome_of_nobody(self) -> None:
        before = len(self.entries)
        self.buffer.record(failed(Place("elsewhere", 0, 0)))
        self.buffer.record(finished(Place("g0", 99, 0), reward=1.0, oldest=0, newest=0))
        assert len(self.entries) == before

    @precondition(lambda self: self.batch is None)
    @rule()
    def take(self) -> None:
        batch = self.buffer.take()
        if batch is not None:
            self.note_batch(batch)

    @precondition(lambda self: self.batch is not None and not self.trained_now)
    @rule()
    def train(self) -> None:
        assert self.batch is not None
        self.buffer.trained(self.batch.batch_id)
        self.trained_now = True

    @precondition(lambda self: self.trained_now)
    @rule()
    def update_weights(self) -> None:
        self.version += 1
        self.buffer.advance(WeightVersion(self.version))
        self.batch = None
        self.trained_now = False

    @precondition(lambda self: self.trained_now)
    @rule()
    def restart(self) -> None:
        """The run resumes from a checkpoint that it has just made. What ran then has no
        worker any more; its groups may be dropped before they are leased again."""
        saved = self.buffer.snapshot(WeightVersion(self.version + 1))
        saved = msgspec.json.decode(msgspec.json.encode(saved), type=BufferSnapshot)
        state_before = self.source.state()
        self.buffer = self.new_buffer()
        self.buffer.restore(saved, [])
        assert self.source.state() == (
            state_before if self.is_told else ToldTasks().state()
        )
        assert self.buffer.snapshot(saved.trained).histories == saved.histories
        self.in_flight = {}
        self.update_weights()

    @rule()
    def a_batch_always_comes_together(self) -> None:
        """No deadlock: if rollouts now finish with differing rewards, the loop moves
        on. Twice, because the second batch must also pass over what the first left to
        age."""
        for _ in range(2):
            if self.batch is not None:
                if not self.trained_now:
                    self.train()
                self.update_weights()
            for _ in range(100):
                batch = self.buffer.take()
                if batch is not None:
                    self.note_batch(batch)
                    break
                self.lease(50)
                for place in list(self.in_flight):
                    started = self.in_flight.pop(place)
                    self.send(
                        finished(
                            place,
                            reward=float(place.index),
                            oldest=started,
                            newest=self.version,
                        )
                    )
            else:
                raise AssertionError(f"no batch: {self.buffer}")

    def teardown(self) -> None:
        """The run ends here: everything leased has ended, and what still comes in
        changes nothing."""
        if not hasattr(self, "buffer"):
            return
        self.buffer.close()
        assert self.buffer.lease() is None
        assert self.buffer.take() is None
        ended = {
            e.place
            for e in self.entries
            if e.state in (RolloutState.TRAINED, RolloutState.DROPPED)
        }
        assert ended == {entry.place for entry in self.entries}
        before = len(self.entries)
        num_told = len(self.source.told)
        for place in self.in_flight:
            self.buffer.record(
                finished(place, reward=1.0, oldest=self.version, newest=self.version)
            )
        assert len(self.entries) == before
        assert len(self.source.told) == num_told

    # --------------------------------------------------------------- what always holds

    @invariant()
    def every_place_moves_forward_and_ends_once(self) -> None:
        last: dict[Place, LedgerEntry] = {}
        for number, entry in enumerate(self.entries):
            assert entry.sequence == number
            before = last.get(entry.place)
            if before is not None:
                assert before.state not in (RolloutState.TRAINED, RolloutState.DROPPED)
            assert (entry.reason is not None) == (entry.state is RolloutState.DROPPED)
            last[entry.place] = entry
        for state in RolloutState:
            counted = self.buffer.metrics()[f"rollouts_{state}"].value()
            assert counted == sum(entry.state is state for entry in last.values())
        self.last = last

    @invariant()
    def the_source_is_told_of_every_group_once_and_of_no_open_one(self) -> None:
        if not self.is_told:
            return
        dropped_by_group = {
            str(group_id): dropped for group_id, _, _, dropped in self.source.told
        }
        assert len(dropped_by_group) == len(self.source.told), "told twice"
        open_groups = {group.group_id for group in self.buffer.wait_report().in_flight}
        leased = {place.group_id for place in self.last}
        assert set(dropped_by_group) == leased - open_groups
        ready_or_later = (
            RolloutState.GROUPED,
            RolloutState.TAKEN,
            RolloutState.TRAINED,
        )
        for place, entry in self.last.items():
            if entry.state in ready_or_later:
                assert dropped_by_group[place.group_id] == ""
        for _, task_id, _, _ in self.source.told:
            assert str(task_id) in {f"t{n}" for n in range(5)}, (
                "the source's own id, not t1@2"
            )

    @invariant()
    def a_history_has_the_complete_groups_of_its_task_that_came_before(self) -> None:
        """What the filter was shown for the newest group of a task is what the source
        was told before it."""
        if not self.is_told:
            return
        complete = [
            entry for entry in self.source.told if len(entry[2]) == self.group_size
        ]  # type: ignore[arg-type]
        rewards_so_far: dict[object, list[list[float]]] = {}
        for group_id, task_id, rewards, _ in complete:
            before = rewards_so_far.setdefault(task_id, [])
            history = self.seen_histories.get(str(group_id))
            # None: dropped before the filter saw it, stale when it was complete
            if history is not None:
                assert history.task_id == task_id
                assert history.num_groups == len(before)
                assert [list(past.rewards_G) for past in history.recent] == before[-16:]
                assert history.num_solved == sum(
                    reward >= 1.0 for group in before for reward in group
                )
            before.append(rewards)  # type: ignore[arg-type]

    @invariant()
    def admission_keeps_its_bound(self) -> None:
        now = self.buffer.metrics()
        under_way = now["groups_in_flight"].value() + now["groups_ready"].value()
        taken = self.batch_size if self.batch is not None else 0
        limit = (self.staleness + 1) * self.batch_size + self.over
        assert under_way + taken <= limit

    @invariant()
    def nothing_trained_was_not_taken(self) -> None:
        trained = {e.place for e in self.entries if e.state is RolloutState.TRAINED}
        assert trained <= self.ever_taken


BufferMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBufferMachine = BufferMachine.TestCase


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("over", [0, 2])
def test_random_run_with_failures_trains_every_step_within_the_staleness_bound(
    staleness: int, over: int
) -> None:
    """Fifty steps with a third of the rollouts failing or equal, the engine always one
    lease behind: no step starves, no group waits longer than the bound, and every drop
    has its reason."""
    entries: list[LedgerEntry] = []
    buffer = GroupBuffer(
        BufferConfig(max_staleness=staleness, over_sampling_groups=over),
        RolloutConfig(
            rollout_batch_size=3, n_samples_per_prompt=2, rollout_max_attempts=2
        ),
        tasks=endless_tasks(),
        group_filter=group_filter_function("nonzero_variance"),
        emit=entries.append,
    )
    chance = itertools.cycle([0, 1, 2, 3, 4, 5, 6])
    pending: list[tuple[Place, int]] = []
    ages: list[int] = []
    for version in range(50):
        batch = buffer.take()
        for _ in range(200):
            if batch is not None:
                break
            while (lease := buffer.lease()) is not None:
                places = [
                    Place(lease.group_id, m.index, m.attempt) for m in lease.members
                ]
                pending += [(place, version) for place in places]
            place, started = pending.pop(0)
            luck = next(chance)
            if luck == 0:
                buffer.record(failed(place))
            else:
                reward = float(place.index if luck > 2 else 1)
                buffer.record(
                    finished(place, reward=reward, oldest=started, newest=version)
                )
            batch = buffer.take()
        assert batch is not None, f"step {version}: {buffer}"
        ages += [
            version - rollout.oldest_version
            for g in batch.groups
            for rollout in g.rollouts_G
        ]
        buffer.trained(batch.batch_id)
        buffer.advance(WeightVersion(version + 1))
    assert max(ages) <= staleness
    reasons = {entry.reason for entry in entries if entry.reason}
    assert {DropReason.ZERO_VARIANCE, DropReason.REPLACED} <= reasons
    assert isinstance(buffer.metrics()["groups_trained"], Sum)
