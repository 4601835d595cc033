"""The groups that are held back while a batch waits for old rollouts."""

from __future__ import annotations

from invrl.buffer.groups.reserve import Reserve


def note(reserve: Reserve, *, in_training: int, outside: int) -> None:
    for _ in range(in_training):
        reserve.note_ended(in_training=True)
    for _ in range(outside):
        reserve.note_ended(in_training=False)


def test_nothing_is_held_back_before_the_first_version_has_ended() -> None:
    reserve = Reserve(batch_size=16, num_versions=2)
    assert reserve.num_groups == 0
    note(reserve, in_training=3, outside=1)
    assert reserve.num_groups == 0
    reserve.advance()
    assert reserve.num_groups == 12


def test_reserve_is_the_share_of_the_rollouts_that_ended_in_training() -> None:
    reserve = Reserve(batch_size=16, num_versions=2)
    note(reserve, in_training=7, outside=2)
    reserve.advance()
    assert reserve.num_groups == 12  # of 112 ninths, rounded down


def test_nothing_is_held_back_where_waits_are_long_beside_training() -> None:
    reserve = Reserve(batch_size=16, num_versions=2)
    note(reserve, in_training=65, outside=35)
    reserve.advance()
    assert reserve.num_groups == 0


def test_only_the_latest_versions_count() -> None:
    reserve = Reserve(batch_size=16, num_versions=2)
    note(reserve, in_training=100, outside=0)
    reserve.advance()
    for _ in range(2):
        note(reserve, in_training=3, outside=1)
        reserve.advance()
    assert reserve.num_groups == 12


def test_version_under_which_nothing_ended_changes_nothing() -> None:
    reserve = Reserve(batch_size=4, num_versions=2)
    reserve.advance()
    assert reserve.num_groups == 0
    note(reserve, in_training=3, outside=1)
    reserve.advance()
    assert reserve.num_groups == 3


def test_rollouts_that_a_resumed_run_replays_do_not_count() -> None:
    reserve = Reserve(batch_size=16, num_versions=2)
    note(reserve, in_training=0, outside=100)
    reserve.forget()
    note(reserve, in_training=3, outside=1)
    reserve.advance()
    assert reserve.num_groups == 12
