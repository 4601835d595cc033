"""A whole asynchronous run on a clock that jumps: whether what is trained has the
lengths of what was asked for, how old it becomes, and how busy the engine is."""

from __future__ import annotations

import pytest
from virtual_run import Setting, VirtualResult, virtual_run

from invrl.buffer.config import Admission, WhenStale

HEAVY_TAIL = Setting(groups=8, group_size=4, sigma=1.0).workload


def lengths_of(
    max_staleness: int, when_stale: WhenStale, admission: Admission = "groups"
) -> VirtualResult:
    return virtual_run(
        HEAVY_TAIL,
        num_steps=40,
        max_staleness=max_staleness,
        when_stale=when_stale,
        admission=admission,
    )


@pytest.mark.parametrize(
    ("max_staleness", "when_stale", "admission"),
    [
        (0, "train", "groups"),
        (1, "train", "groups"),
        (4, "train", "groups"),
        (4, "train", "ready"),
        (2, "mask", "groups"),
        (2, "wait", "groups"),
    ],
)
def test_trained_rollouts_are_as_long_as_those_asked_for(
    max_staleness: int, when_stale: WhenStale, admission: Admission
) -> None:
    result = lengths_of(max_staleness, when_stale, admission)
    assert len(result.asked_lengths) > 500
    assert sorted(result.trained_of_asked) == sorted(result.asked_lengths)


def test_dropping_stale_groups_trains_shorter_rollouts() -> None:
    """What the other rules are there for; and the comparison above can fail."""
    assert lengths_of(1, "drop").length_ratio < 0.9


@pytest.mark.parametrize("when_stale", ["wait", "drop"])
def test_no_token_is_older_than_the_bound_where_it_is_strict(
    when_stale: WhenStale,
) -> None:
    assert max(lengths_of(2, when_stale).ages) == 2


def test_asynchronous_run_is_faster_than_a_synchronous_one() -> None:
    synchronous, ahead = lengths_of(0, "train"), lengths_of(4, "train")
    assert (
        ahead.trained_tokens / ahead.seconds
        > 1.5 * synchronous.trained_tokens / synchronous.seconds
    )


def test_run_on_a_jumping_clock_repeats_itself() -> None:
    assert lengths_of(4, "train") == lengths_of(4, "train")
