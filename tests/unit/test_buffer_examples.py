"""Single situations of the buffer, one each, with the numbers written out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from small_buffer import complete, failure, lease_all, make, summary, tasks

from invrl.buffer.config import WhenStale
from invrl.buffer.groups.group_buffer import GroupBuffer
from invrl.buffer.groups.group_filters import group_filter_function, nonzero_variance
from invrl.buffer.ledger.ledger import EntryFacts, Ledger, LedgerEntry
from invrl.buffer.ledger.open_group import OpenGroup, RolloutState
from invrl.errors import BufferStateError, PluginError
from invrl.interfaces import GroupFilter
from invrl.observe.metrics.step_metrics import rollout_metrics
from invrl.types.groups import Group
from invrl.types.leases import Place
from invrl.types.metrics import resolve
from invrl.types.reasons import DropReason, FailureReason
from invrl.types.tasks import Task
from invrl.types.weights import WeightVersion


def values(buffer: GroupBuffer) -> dict[str, float]:
    return resolve(buffer.metrics())


# ----------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("staleness", "over", "expected"),
    [
        (0, 0, 3),
        (1, 0, 6),
        (3, 2, 14),
    ],
)
def test_number_of_open_groups_is_bounded_by_staleness(
    staleness: int, over: int, expected: int
) -> None:
    buffer = make(staleness=staleness, over=over, batch=3)
    assert len(lease_all(buffer)) == expected


def test_bound_0_leases_nothing_between_take_and_advance() -> None:
    """A rollout begun then would be one version old when its batch is taken."""
    buffer = make(staleness=0, batch=1)
    (lease,) = lease_all(buffer)
    complete(buffer, lease.group_id)
    batch = buffer.take()
    assert batch is not None
    assert buffer.lease() is None
    buffer.trained(batch.batch_id)
    assert buffer.lease() is None
    buffer.advance(WeightVersion(1))
    assert buffer.lease() is not None


@pytest.mark.parametrize(
    ("staleness", "is_taken"),
    [
        (0, False),
        (1, True),
    ],
)
def test_an_older_engine_makes_a_rollout_as_old_as_its_oldest_token(
    staleness: int, is_taken: bool
) -> None:
    """In a rolling update engines differ by a version, so a rollout may have tokens of
    both. It is taken once the last engine holds the newer version, if the bound admits
    the older one."""
    buffer = make(staleness=staleness, when_stale="drop")
    lease = lease_all(buffer)[0]
    complete(buffer, lease.group_id, oldest=0, newest=1)
    assert buffer.take() is None
    buffer.advance(WeightVersion(1))
    assert (buffer.take() is not None) == is_taken
    assert buffer.events.dropped["stale"] == (0 if is_taken else 1)


def test_bound_1_leases_the_next_batch_while_a_batch_trains() -> None:
    buffer = make(staleness=1, batch=2)
    first = lease_all(buffer)
    assert len(first) == 4
    for lease in first[:2]:
        complete(buffer, lease.group_id)
    batch = buffer.take()
    assert batch is not None
    assert buffer.lease() is None  # two taken, two in flight
    for lease in first[2:]:
        complete(buffer, lease.group_id)
    buffer.trained(batch.batch_id)
    buffer.advance(WeightVersion(1))
    batch = buffer.take()
    assert batch is not None
    assert rollout_metrics(batch)["staleness_max"].value() == 1.0


def test_advance_without_a_new_version_frees_places_for_new_groups() -> None:
    """A loop without a trainer."""
    buffer = make(batch=1)
    for step in range(3):
        (lease,) = lease_all(buffer)
        complete(buffer, lease.group_id)
        batch = buffer.take()
        assert batch is not None
        assert batch.batch_id == step
        assert batch.version == 0
        buffer.trained(batch.batch_id)
        buffer.advance(WeightVersion(0))


def test_rollout_only_drops_a_batch_and_leases_the_next() -> None:
    entries: list[LedgerEntry] = []
    buffer = make(batch=1, entries=entries)
    for step in range(2):
        (lease,) = lease_all(buffer)
        complete(buffer, lease.group_id)
        batch = buffer.take()
        assert batch is not None
        assert batch.batch_id == step
        buffer.advance(batch.version)
    assert [entry.reason for entry in entries if entry.reason] == [
        DropReason.NOT_TRAINED
    ] * 4
    assert values(buffer)["groups_dropped/not_trained"] == 2


# ----------------------------------------------------------------- failed members


def test_a_failed_member_is_replaced_before_new_groups_begin() -> None:
    buffer = make(batch=2)
    lease = buffer.lease()
    assert lease is not None
    assert [(m.index, m.attempt) for m in lease.members] == [(0, 0), (1, 0)]
    buffer.record(failure("g0", 1))
    again = buffer.lease()
    assert again is not None
    assert again.group_id == "g0"
    assert again.task == lease.task
    assert [(m.index, m.attempt) for m in again.members] == [(1, 1)]
    following = buffer.lease()
    assert following is not None
    assert following.group_id == "g1"


def test_two_failed_members_are_replaced_in_one_lease() -> None:
    buffer = make(group=3)
    buffer.lease()
    buffer.record(failure("g0", 2))
    buffer.record(failure("g0", 0))
    lease = buffer.lease()
    assert lease is not None
    assert [(m.index, m.attempt) for m in lease.members] == [(0, 1), (2, 1)]


def test_group_is_dropped_whole_after_the_last_attempt() -> None:
    entries: list[LedgerEntry] = []
    buffer = make(group=3, attempts=2, entries=entries)
    buffer.lease()
    buffer.record(summary("g0", 1))
    buffer.record(failure("g0", 0))
    buffer.lease()
    buffer.record(failure("g0", 0, attempt=1))
    ends = {e.place: e.reason for e in entries if e.state is RolloutState.DROPPED}
    assert ends == {
        Place("g0", 0, 0): DropReason.REPLACED,
        Place("g0", 0, 1): DropReason.INCOMPLETE,
        Place("g0", 1, 0): DropReason.INCOMPLETE,
        Place("g0", 2, 0): DropReason.INCOMPLETE,
    }
    assert [e.failure for e in entries if e.place.index == 0 and e.reason] == [
        FailureReason.EXCEPTION
    ] * 2
    buffer.record(summary("g0", 2))  # its worker did not know
    metrics = values(buffer)
    assert metrics["groups_dropped/incomplete"] == 1
    assert metrics["rollouts_dropped/incomplete"] == 3
    assert metrics["rollouts_dropped/replaced"] == 1
    assert metrics["rollouts_failed/exception"] == 2
    assert metrics["outcomes_late"] == 1
    assert not buffer._in_flight


def test_a_dropped_group_leaves_no_replacement_behind() -> None:
    """Index 0 waits for its second try when index 1 uses up its last."""
    buffer = make(group=2, attempts=2)
    buffer.lease()
    buffer.record(failure("g0", 1))
    buffer.lease()
    buffer.record(failure("g0", 0))
    buffer.record(failure("g0", 1, attempt=1))
    lease = buffer.lease()
    assert lease is not None
    assert lease.group_id == "g1"


@pytest.mark.parametrize(
    "reward",
    [
        float("nan"),
        float("inf"),
    ],
)
def test_reward_that_is_not_a_number_fails_the_rollout(reward: float) -> None:
    buffer = make()
    buffer.lease()
    buffer.record(summary("g0", 0, reward=reward))
    assert values(buffer)["rollouts_failed/bad_reward"] == 1


# ----------------------------------------------------------------- filters


def test_equal_rewards_are_dropped_and_replaced_by_another_group() -> None:
    buffer = make(batch=1, group_filter=nonzero_variance)
    buffer.lease()
    buffer.record(summary("g0", 0, reward=0.5))
    buffer.record(summary("g0", 1, reward=0.5))
    assert buffer.take() is None
    lease = buffer.lease()
    assert lease is not None
    complete(buffer, lease.group_id)
    batch = buffer.take()
    assert batch is not None
    assert [group.id for group in batch.groups] == ["g1"]
    metrics = values(buffer)
    assert metrics["groups_dropped/zero_variance"] == 1
    assert metrics["rollouts_dropped/zero_variance"] == 2
    # (0.5 + 0.5 + 0 + 1) / 4: the dropped group counts
    assert metrics["finished_reward_mean"] == 0.5


def raising(group: Group) -> str | None:
    raise ValueError("oops")


def wordless(group: Group) -> str | None:
    return 3  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("group_filter", "word"),
    [
        (lambda group: "too_long", "too_long"),
        (raising, "filter_raised_ValueError"),
        (wordless, "filter_returned_no_word"),
    ],
)
def test_group_filter_of_the_user_names_its_own_drop_reason(
    group_filter: GroupFilter, word: str
) -> None:
    entries: list[LedgerEntry] = []
    buffer = make(group_filter=group_filter, entries=entries)
    buffer.lease()
    complete(buffer, "g0")
    assert values(buffer)[f"groups_dropped/filtered/{word}"] == 1
    assert {(e.reason, e.detail) for e in entries if e.reason} == {
        (DropReason.FILTERED, word)
    }
    assert buffer.events.dropped == {f"filtered/{word}": 1}


def test_a_group_without_a_trained_token_is_dropped() -> None:
    buffer = make()
    buffer.lease()
    for index in range(2):
        buffer.record(summary("g0", index, reward=float(index), tokens=0))
    assert values(buffer)["groups_dropped/filtered/no_trained_tokens"] == 1


def test_group_filters_are_found_by_name_and_a_wrong_name_suggests_the_nearest() -> (
    None
):
    assert group_filter_function("nonzero_variance") is nonzero_variance
    with pytest.raises(PluginError, match="did you mean 'nonzero_variance'"):
        group_filter_function("non_zero_variance")


# ----------------------------------------------------------------- versions


def test_batch_is_taken_only_after_the_canary_of_its_version() -> None:
    buffer = make(staleness=1, batch=1)
    buffer.lease()
    complete(buffer, "g0", oldest=0, newest=1)  # the engines are already on 1
    assert buffer.take() is None
    assert "1 of them wait for the canary of their weight version" in str(buffer)
    buffer.advance(WeightVersion(1))
    assert buffer.take() is not None


def test_oldest_token_of_a_group_decides_whether_it_is_stale() -> None:
    """Bound 1, trainer at 2: a rollout that began under 0 is too old, whatever it ended
    under."""
    buffer = make(staleness=1, batch=1, when_stale="drop")
    leases = lease_all(buffer)
    assert [lease.group_id for lease in leases] == ["g0", "g1"]
    buffer.advance(WeightVersion(2))
    complete(buffer, "g0", oldest=0, newest=2)
    complete(buffer, "g1", oldest=1, newest=2)
    batch = buffer.take()
    assert batch is not None
    assert [group.id for group in batch.groups] == ["g1"]
    assert values(buffer)["groups_dropped/stale"] == 1


def test_group_with_one_stale_member_is_dropped_at_once() -> None:
    buffer = make(staleness=0, batch=1, when_stale="drop")
    buffer.lease()
    buffer.record(summary("g0", 0))
    buffer.advance(WeightVersion(1))
    assert not buffer._in_flight
    assert values(buffer)["rollouts_dropped/stale"] == 2  # the one in flight too


def test_a_group_is_as_old_as_the_oldest_token_of_all_its_rollouts() -> None:
    buffer = make(staleness=1, batch=1, when_stale="drop")
    buffer.lease()
    buffer.record(summary("g0", 0, oldest=0, newest=0))
    buffer.advance(WeightVersion(1))
    buffer.record(summary("g0", 1, oldest=1, newest=1))
    assert values(buffer)["groups_ready"] == 1
    buffer.advance(WeightVersion(2))
    assert buffer.take() is None
    assert values(buffer)["groups_dropped/stale"] == 1


def test_older_groups_are_taken_first() -> None:
    buffer = make(staleness=3, batch=1)
    lease_all(buffer)
    buffer.advance(WeightVersion(3))
    complete(buffer, "g3", oldest=3, newest=3)
    complete(buffer, "g2", oldest=1, newest=3)
    complete(buffer, "g1", oldest=1, newest=3)
    taken = []
    for _ in range(3):
        batch = buffer.take()
        assert batch is not None
        taken.append(batch.groups[0].id)
        buffer.trained(batch.batch_id)
        buffer.advance(WeightVersion(3))
    assert taken == ["g1", "g2", "g3"]


def train_next(buffer: GroupBuffer) -> list[str]:
    """Take and train a batch, and advance by a version. Return the batch's groups."""
    batch = buffer.take()
    assert batch is not None
    buffer.trained(batch.batch_id)
    buffer.advance(WeightVersion(batch.version + 1))
    return [group.id for group in batch.groups]


def test_groups_left_over_by_a_full_batch_come_next() -> None:
    buffer = make(staleness=1, over=1, batch=1)
    assert len(lease_all(buffer)) == 3
    for group_id in ("g0", "g1", "g2"):
        complete(buffer, group_id)
    taken = [train_next(buffer) for _ in range(3)]
    assert taken == [["g0"], ["g1"], ["g2"]]  # the last two versions old, one beyond
    metrics = values(buffer)
    assert metrics["groups_trained"] == 3
    assert not buffer.events.dropped


@pytest.mark.parametrize("when_stale", ["train", "mask"])
def test_slow_group_is_trained_whatever_its_age(when_stale: WhenStale) -> None:
    buffer = make(staleness=1, batch=1, when_stale=when_stale)
    lease_all(buffer)
    for version in range(4):
        complete(buffer, f"g{version + 1}", oldest=version, newest=version)
        assert train_next(buffer) == [f"g{version + 1}"]
        lease_all(buffer)
    assert buffer.suspects() == []
    complete(buffer, "g0", oldest=0, newest=4)
    assert train_next(buffer) == ["g0"]
    assert not buffer.events.dropped


def test_batch_waits_for_the_group_that_would_become_too_old() -> None:
    buffer = make(staleness=1, batch=1, when_stale="wait")
    assert [lease.group_id for lease in lease_all(buffer)] == ["g0", "g1"]
    complete(buffer, "g1")
    assert train_next(buffer) == ["g1"]
    lease_all(buffer)
    complete(buffer, "g2", oldest=1, newest=1)
    assert buffer.take() is None
    assert "groups in flight would become too old (--when-stale wait)" in str(buffer)
    complete(buffer, "g0", oldest=0, newest=1)
    assert train_next(buffer) == ["g0"]
    assert train_next(buffer) == ["g2"]


def test_batch_waits_if_more_old_groups_would_be_left_than_the_next_one_holds() -> None:
    """Two groups are as old as two versions allow, and a batch holds one."""
    buffer = make(staleness=2, batch=1, when_stale="wait")
    assert [lease.group_id for lease in lease_all(buffer)] == ["g0", "g1", "g2"]
    complete(buffer, "g2")
    assert train_next(buffer) == ["g2"]
    lease_all(buffer)
    complete(buffer, "g3", oldest=1, newest=1)
    assert buffer.take() is None
    complete(buffer, "g1", oldest=0, newest=1)
    assert train_next(buffer) == ["g1"]
    complete(buffer, "g0", oldest=0, newest=2)
    assert train_next(buffer) == ["g0"]
    assert train_next(buffer) == ["g3"]


def test_batch_waits_for_a_retry_beside_which_an_old_rollout_has_finished() -> None:
    """The running member is young; the group is as old as its finished member."""
    buffer = make(staleness=1, batch=1, when_stale="wait")
    lease_all(buffer)
    buffer.record(summary("g0", 0, oldest=0, newest=0))
    complete(buffer, "g1")
    assert train_next(buffer) == ["g1"]
    buffer.record(failure("g0", 1))
    lease_all(buffer)
    complete(buffer, "g2", oldest=1, newest=1)
    assert buffer.take() is None
    buffer.record(summary("g0", 1, attempt=1, oldest=1, newest=1))
    assert train_next(buffer) == ["g0"]


def test_part_of_the_new_groups_is_held_back_until_a_waiting_batch_is_taken() -> None:
    """Ten of the 14 rollouts of the first two versions ended while a batch trained: 20
    fourteenths of the two groups of a batch are held back, rounded down."""
    buffer = make(staleness=2, batch=2, when_stale="wait")
    lease_all(buffer)
    complete(buffer, "g4")
    complete(buffer, "g5")
    assert buffer.take() is not None
    for number in range(1, 4):
        complete(buffer, f"g{number}")
    buffer.trained(0)
    buffer.advance(WeightVersion(1))
    assert [lease.group_id for lease in lease_all(buffer)] == ["g6", "g7"]
    assert buffer.take() is not None
    complete(buffer, "g6", oldest=1, newest=1)
    complete(buffer, "g7", oldest=1, newest=1)
    buffer.trained(1)
    buffer.advance(WeightVersion(2))

    assert buffer.take() is None  # g3 and g6 wait for g0
    assert [lease.group_id for lease in lease_all(buffer)] == ["g8"]
    complete(buffer, "g0", newest=2)
    assert buffer.take() is not None
    assert [lease.group_id for lease in lease_all(buffer)] == ["g9"]

    complete(buffer, "g8", oldest=2, newest=2)
    complete(buffer, "g9", oldest=2, newest=2)
    buffer.trained(2)
    buffer.advance(WeightVersion(3))
    assert len(lease_all(buffer)) == 2  # no batch waits


def test_admission_by_ready_groups_bounds_only_what_waits_for_the_trainer() -> None:
    buffer = make(staleness=1, batch=2, admission="ready")
    leases = [buffer.lease() for _ in range(20)]
    assert None not in leases
    complete(buffer, "g0")
    assert buffer.lease() is not None
    complete(buffer, "g1")
    assert buffer.lease() is None  # a batch is ready
    batch = buffer.take()
    assert batch is not None
    assert buffer.lease() is not None  # it is taken: the next one may be sampled


def test_tokens_that_were_sampled_and_never_trained_are_counted_by_reason() -> None:
    buffer = make(staleness=0, batch=1, when_stale="drop", attempts=1)
    buffer.lease()
    buffer.record(summary("g0", 0))
    buffer.advance(WeightVersion(1))
    stale = summary("g0", 0).sampled_tokens
    cancelled = replace(
        failure("g0", 1), reason=FailureReason.GROUP_DROPPED, partial=summary("g0", 1)
    )
    buffer.record(cancelled)
    counted = values(buffer)
    assert counted["tokens_not_trained/stale"] == stale
    assert counted["tokens_not_trained/group_dropped"] == stale


# ----------------------------------------------------------------- the order of calls


def test_buffer_calls_out_of_order_are_refused() -> None:
    buffer = make()
    buffer.lease()
    complete(buffer, "g0")
    with pytest.raises(BufferStateError):
        buffer.trained(0)
    batch = buffer.take()
    assert batch is not None
    with pytest.raises(BufferStateError, match="batch 0 is out"):
        buffer.take()
    with pytest.raises(BufferStateError, match="batch 0 is not trained"):
        buffer.advance(WeightVersion(1))
    buffer.trained(0)
    with pytest.raises(BufferStateError):
        buffer.trained(0)
    buffer.advance(WeightVersion(1))
    with pytest.raises(BufferStateError, match="version 0 after 1"):
        buffer.advance(WeightVersion(0))


def test_recording_an_outcome_twice_changes_nothing() -> None:
    entries: list[LedgerEntry] = []
    buffer = make(entries=entries)
    buffer.lease()
    for _ in range(3):
        buffer.record(summary("g0", 0))
        buffer.record(failure("g0", 0))
    assert [e.state for e in entries if e.place.index == 0] == [
        RolloutState.IN_FLIGHT,
        RolloutState.FINISHED,
    ]
    assert values(buffer)["outcomes_late"] == 5


def test_closing_the_buffer_drops_every_open_rollout() -> None:
    entries: list[LedgerEntry] = []
    buffer = make(staleness=2, batch=1, entries=entries)
    assert len(lease_all(buffer)) == 3
    complete(buffer, "g0")
    assert buffer.take() is not None
    complete(buffer, "g1")
    buffer.close()
    last = {e.place: e for e in entries}
    assert len(last) == 6
    assert {(e.state, e.reason) for e in last.values()} == {
        (RolloutState.DROPPED, DropReason.RUN_ENDED)
    }
    assert values(buffer)["groups_dropped/run_ended"] == 3
    assert buffer.lease() is None


# ----------------------------------------------------------------- the task source


def broken_source() -> Iterator[Task]:
    yield from tasks(1)
    raise OSError("disk gone")


def dict_source() -> Iterator[Task]:
    yield from tasks(1)
    yield {"id": "t1"}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (tasks(1), "the task source has ended"),
        (broken_source(), "the task source raised OSError: disk gone"),
        (dict_source(), "the task source yielded dict, not invrl.types.Task"),
    ],
)
def test_task_source_that_ends_is_named(source: Iterator[Task], word: str) -> None:
    buffer = make(staleness=1, batch=1, source=source)
    assert len(lease_all(buffer)) == 1
    assert buffer.can_fill  # g0 is still to come
    complete(buffer, "g0")
    batch = buffer.take()
    assert batch is not None
    assert not buffer.can_fill
    assert word in str(buffer)


# ----------------------------------------------------------------- the ledger


def test_ledger_records_only_allowed_state_transitions() -> None:
    ledger = Ledger()
    group = OpenGroup(0, "t", "t", attempts_G=[0], states_G=[None])
    with pytest.raises(BufferStateError):
        ledger.move(group, 0, RolloutState.FINISHED)
    ledger.move(group, 0, RolloutState.IN_FLIGHT)
    with pytest.raises(BufferStateError):
        ledger.move(group, 0, RolloutState.IN_FLIGHT)
    with pytest.raises(BufferStateError, match="drop reason"):
        ledger.move(group, 0, RolloutState.DROPPED)
    ledger.move(group, 0, RolloutState.FINISHED)
    ledger.move(group, 0, RolloutState.GROUPED)
    with pytest.raises(BufferStateError, match="batch"):
        ledger.move(group, 0, RolloutState.TAKEN)
    ledger.move(group, 0, RolloutState.TAKEN, batch_id=0)
    ledger.move(group, 0, RolloutState.TRAINED, batch_id=0)
    with pytest.raises(BufferStateError):
        ledger.move(group, 0, RolloutState.DROPPED, reason=DropReason.RUN_ENDED)
    assert ledger.counts[RolloutState.TRAINED] == 1
    assert ledger.counts[RolloutState.IN_FLIGHT] == 0


def test_a_rollout_never_comes_back_to_a_state() -> None:
    ledger = Ledger()
    group = OpenGroup(0, "t", "t", attempts_G=[0], states_G=[None])
    path = [
        RolloutState.IN_FLIGHT,
        RolloutState.FINISHED,
        RolloutState.GROUPED,
        RolloutState.TAKEN,
        RolloutState.TRAINED,
    ]
    facts = {
        RolloutState.TAKEN: EntryFacts(batch_id=0),
        RolloutState.TRAINED: EntryFacts(batch_id=0),
    }
    for number, state in enumerate(path, start=1):
        ledger.move(group, 0, state, **facts.get(state, EntryFacts()))
        for earlier in path[:number]:
            with pytest.raises(BufferStateError, match="cannot go from"):
                ledger.move(group, 0, earlier, **facts.get(earlier, EntryFacts()))
