"""A buffer restored from a checkpoint's snapshot goes on as the one that was never
stopped."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from small_buffer import (
    complete,
    failure,
    lease_all,
    make,
    summary,
    tasks,
    through_bytes,
)

from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.snapshot import BufferSnapshot
from invrl.buffer.ledger.ledger import LedgerEntry
from invrl.buffer.ledger.ledger_store import (
    LedgerStore,
    check_lineage,
    read_incarnations,
    read_ledger,
)
from invrl.buffer.ledger.open_group import RolloutState
from invrl.errors import BufferStateError
from invrl.types.batches import TakenBatch
from invrl.types.leases import GroupLease, Place
from invrl.types.weights import WeightVersion


def play(
    buffer: GroupBuffer, pending: list[GroupLease], step: int, *, draw: random.Random
) -> TakenBatch:
    """One step of a loop whose rollouts fail now and then. `pending`: leases without an
    outcome."""
    while (batch := buffer.take()) is None:
        pending.extend(lease_all(buffer))
        lease = pending.pop(draw.randrange(len(pending)))
        for member in lease.members:
            if draw.random() < 0.2:
                buffer.record(failure(lease.group_id, member.index, member.attempt))
            else:
                reward = round(draw.random(), 3)
                buffer.record(
                    summary(
                        lease.group_id,
                        member.index,
                        attempt=member.attempt,
                        reward=reward,
                        oldest=step,
                        newest=step,
                    )
                )
    buffer.trained(batch.batch_id)
    return batch


def go_on(buffer: GroupBuffer, version: int) -> None:
    buffer.advance(WeightVersion(version))


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("stop_after", [1, 4])
def test_restored_buffer_repeats_the_decisions_of_the_uninterrupted_buffer(
    staleness: int, stop_after: int
) -> None:
    """Twenty seeds, each with failures and replacements. The first buffer's open leases
    are recorded after the snapshot in the same order that the second one leases them
    again."""
    for seed in range(20):
        entries: list[LedgerEntry] = []
        first = make(
            staleness=staleness, batch=2, attempts=3, source=tasks(), entries=entries
        )
        draw = random.Random(seed)
        pending = list[GroupLease]()
        for step in range(stop_after):
            play(first, pending, step, draw=draw)
            if step + 1 < stop_after:
                go_on(first, step + 1)
        saved = through_bytes(first, stop_after)
        again: list[LedgerEntry] = []
        second = make(
            staleness=staleness, batch=2, attempts=3, source=tasks(), entries=again
        )
        second.restore(saved, [])
        assert saved == through_bytes_of_open(first, second, stop_after)
        kept = [entry for entry in entries if entry.sequence < saved.sequence]
        for buffer in (first, second):
            go_on(buffer, stop_after)
        alive = in_flight(first)  # a lease may outlive its group
        pending = [
            lease
            for lease in pending
            if alive & {place_of(lease, m) for m in lease.members}
        ]
        leased = {
            place_of(lease, m) for lease in pending for m in lease.members
        } & alive
        pending_again = lease_all(second)
        newly = {place_of(lease, m) for lease in pending_again for m in lease.members}
        assert leased <= newly, (
            "what was in flight is leased again, under the same attempt"
        )
        pending.extend(lease_all(first))
        assert newly == in_flight(first) == in_flight(second)
        for step in range(stop_after, stop_after + 3):
            draw_of = random.Random(1000 * seed + step)
            play(second, pending_again, step, draw=draw_of)
            go_on(second, step + 1)
        check_states([*kept, *again])


def in_flight(buffer: GroupBuffer) -> set[Place]:
    return {
        Place(f"g{group.number}", index, attempt)
        for group in buffer.snapshot(WeightVersion(0)).in_flight
        for index, attempt in enumerate(group.attempts_G)
        if group.states_G[index] is RolloutState.IN_FLIGHT
    }


def place_of(lease: GroupLease, member) -> Place:
    return Place(lease.group_id, member.index, member.attempt)


def through_bytes_of_open(
    first: GroupBuffer, second: GroupBuffer, trained: int
) -> BufferSnapshot:
    """The second buffer's snapshot with the members that were in flight in flight
    again: what it restored."""
    lease_again = [
        buffer.snapshot(WeightVersion(trained)) for buffer in (first, second)
    ]
    assert [g.finished for g in lease_again[1].in_flight] == [
        g.finished for g in lease_again[0].in_flight
    ]
    assert lease_again[1].ready == lease_again[0].ready
    assert lease_again[1].groups_leased == lease_again[0].groups_leased
    return lease_again[0]


def check_states(entries: list[LedgerEntry]) -> None:
    """A place ends at most once and is in one batch at most, over both incarnations."""
    ended: set[Place] = set()
    for entry in entries:
        assert entry.place not in ended, entry
        if entry.state in (RolloutState.TRAINED, RolloutState.DROPPED):
            ended.add(entry.place)


class TestOutcomesAfterTheSnapshot:
    """A crash comes later than the checkpoint: some rollouts have ended meanwhile."""

    @pytest.fixture
    def saved(self) -> BufferSnapshot:
        buffer = make(staleness=2, batch=1)
        leases = lease_all(buffer)
        assert [lease.group_id for lease in leases] == ["g0", "g1", "g2"]
        complete(buffer, "g0")
        buffer.record(summary("g1", 0, reward=0.5))
        batch = buffer.take()
        assert batch is not None
        buffer.trained(batch.batch_id)
        return through_bytes(buffer, 1)

    def leased(self, saved: BufferSnapshot, *since) -> list[tuple[str, int, int]]:
        buffer = make(staleness=2, batch=1)
        buffer.restore(saved, since)
        go_on(buffer, 1)
        return [
            (lease.group_id, m.index, m.attempt)
            for lease in lease_all(buffer)
            for m in lease.members
        ]

    def test_rollouts_in_flight_at_a_snapshot_are_leased_again(
        self, saved: BufferSnapshot
    ) -> None:
        assert self.leased(saved)[:3] == [
            ("g1", 1, 0),
            ("g2", 0, 0),
            ("g2", 1, 0),
        ]

    def test_rollout_sampled_under_the_checkpoints_weights_counts_after_a_restore(
        self, saved: BufferSnapshot
    ) -> None:
        leased = self.leased(saved, summary("g1", 1, reward=1.0, newest=1))
        assert leased[:2] == [("g2", 0, 0), ("g2", 1, 0)]

    def test_rollout_sampled_under_lost_weights_is_leased_again(
        self, saved: BufferSnapshot
    ) -> None:
        assert ("g1", 1, 0) in self.leased(
            saved, summary("g1", 1, reward=1.0, newest=2)
        )

    def test_failure_in_a_lost_incarnation_does_not_count_as_an_attempt(
        self, saved: BufferSnapshot
    ) -> None:
        assert ("g1", 1, 0) in self.leased(saved, failure("g1", 1))

    def test_group_leased_only_by_a_lost_incarnation_is_leased_again(
        self, saved: BufferSnapshot
    ) -> None:
        assert ("g3", 0, 0) in self.leased(saved, summary("g3", 0, reward=1.0))

    def test_closing_before_restored_rollouts_are_leased_drops_them(
        self, saved: BufferSnapshot
    ) -> None:
        again: list[LedgerEntry] = []
        buffer = make(staleness=2, batch=1, entries=again)
        buffer.restore(saved, [])
        buffer.close()
        last = {
            (entry.place.group_id, entry.place.index): entry.state for entry in again
        }
        assert last == dict.fromkeys(
            [("g1", 0), ("g1", 1), ("g2", 0), ("g2", 1)], RolloutState.DROPPED
        )

    def test_restore_with_other_tasks_is_refused(self, saved: BufferSnapshot) -> None:
        renamed = (task for task in tasks() if task.id != "t0")
        with pytest.raises(
            BufferStateError, match="g1 had task t1, the task source now gives t2"
        ):
            make(staleness=2, source=renamed).restore(saved, [])

    def test_restore_with_too_short_a_task_source_is_refused(
        self, saved: BufferSnapshot
    ) -> None:
        with pytest.raises(BufferStateError, match="the task source has ended"):
            make(staleness=2, source=tasks(2)).restore(saved, [])


def test_snapshot_is_refused_while_a_batch_is_not_trained() -> None:
    buffer = make()
    lease_all(buffer)
    complete(buffer, "g0")
    assert buffer.take() is not None
    with pytest.raises(BufferStateError, match="is not trained"):
        buffer.snapshot(WeightVersion(1))


def test_a_snapshot_stays_as_it_is_while_the_buffer_goes_on() -> None:
    buffer = make(staleness=1, batch=1)
    lease_all(buffer)
    complete(buffer, "g0")
    snapshot = buffer.snapshot(WeightVersion(0))
    before = msgspec.json.encode(snapshot)
    buffer.record(summary("g1", 0))
    batch = buffer.take()
    assert batch is not None
    buffer.trained(batch.batch_id)
    assert msgspec.json.encode(snapshot) == before


class TestLineage:
    """Three incarnations: the second goes on from the first's checkpoint, the third
    from the first's too."""

    def entry(
        self, sequence: int, group: str, state: RolloutState, batch: int | None = None
    ) -> LedgerEntry:
        return LedgerEntry(
            sequence=sequence,
            place=Place(group, 0, 0),
            task_id="t",
            state=state,
            batch_id=batch,
        )

    def test_ledger_keeps_only_entries_of_the_last_incarnations_ancestors(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "run.sqlite"
        store = LedgerStore(path)
        assert store.begin(parent=0, step=0, sequence=0) == 1
        store.write(
            [
                self.entry(0, "g0", RolloutState.IN_FLIGHT),
                self.entry(1, "g1", RolloutState.IN_FLIGHT),
            ]
        )
        store.begin(parent=1, step=4, sequence=1)
        store.write([self.entry(1, "g2", RolloutState.IN_FLIGHT)])
        store.begin(parent=1, step=4, sequence=1)
        store.write([self.entry(1, "g3", RolloutState.IN_FLIGHT)])
        assert [
            (incarnation.number, incarnation.parent, incarnation.step)
            for incarnation in read_incarnations(path)
        ] == [
            (1, 0, 0),
            (2, 1, 4),
            (3, 1, 4),
        ]
        kept = [
            record.entry.place.group_id
            for record in read_ledger(path)
            if not record.lost
        ]
        assert kept == ["g0", "g3"]

    def test_entries_lost_by_a_grandparent_incarnation_stay_lost(
        self, tmp_path: Path
    ) -> None:
        """The grandchild began with a checkpoint that its parent inherited from before
        its own beginning."""
        path = tmp_path / "run.sqlite"
        store = LedgerStore(path)
        store.begin(parent=0, step=0, sequence=0)
        store.write([self.entry(n, f"g{n}", RolloutState.IN_FLIGHT) for n in range(6)])
        store.begin(parent=1, step=2, sequence=3)
        store.begin(parent=2, step=1, sequence=2)
        assert [
            record.entry.place.group_id
            for record in read_ledger(path)
            if not record.lost
        ] == [
            "g0",
            "g1",
        ]

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            (
                [("g0", RolloutState.TRAINED, 0), ("g0", RolloutState.TRAINED, 1)],
                "ended as trained",
            ),
            (
                [("g0", RolloutState.DROPPED, None), ("g0", RolloutState.TAKEN, 0)],
                "ended as dropped",
            ),
            ([("g0", RolloutState.TRAINED, 1)], "one is missing"),
            (
                [("g0", RolloutState.TRAINED, 0), ("g1", RolloutState.TRAINED, 2)],
                "one is missing",
            ),
            ([("g0", RolloutState.FINISHED, None)], "1 rollouts have not ended"),
        ],
    )
    def test_lineage_check_finds_rollouts_with_two_or_no_ends(
        self, tmp_path: Path, entries, message: str
    ) -> None:
        store = LedgerStore(tmp_path / "run.sqlite")
        store.begin(parent=0, step=0, sequence=0)
        store.write(
            [
                self.entry(n, group, state, batch)
                for n, (group, state, batch) in enumerate(entries)
            ]
        )
        with pytest.raises(BufferStateError, match=message):
            check_lineage(read_ledger(tmp_path / "run.sqlite"), ended=True)


@pytest.mark.parametrize(
    ("reached", "is_trained", "state"),
    [
        (
            1,
            True,
            RolloutState.TRAINED,
        ),  # interrupted after the batch was trained, and the buffer knows
        (
            1,
            False,
            RolloutState.TRAINED,
        ),  # trained, and the loop could not say so
        (0, False, RolloutState.DROPPED),  # interrupted before the trainer got it
    ],
)
def test_a_run_that_is_interrupted_with_a_batch_out_has_a_snapshot(
    reached: int, is_trained: bool, state: RolloutState
) -> None:
    entries: list[LedgerEntry] = []
    buffer = make(batch=1, source=tasks(), entries=entries)
    [lease] = lease_all(buffer)
    complete(buffer, lease.group_id)
    batch = buffer.take()
    assert batch is not None
    with pytest.raises(BufferStateError):
        buffer.snapshot(WeightVersion(reached))
    if is_trained:
        buffer.trained(batch.batch_id)
    buffer.settle(WeightVersion(reached))
    assert entries[-1].state is state
    saved = through_bytes(buffer, reached)
    again = make(batch=1, source=tasks(), entries=[])
    again.restore(saved, [])
    go_on(again, reached)
    [next_lease] = lease_all(again)
    assert next_lease.group_id != lease.group_id
