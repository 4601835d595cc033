"""The bench of agents tells a fork that is explained from one that is not."""

from __future__ import annotations

import pytest

from benchmarks.agents import Seen

CHANGE = {
    "message": 0,
    "role": "system",
    "part": "content",
    "recorded": "a",
    "sent": "b",
}


def turn(
    name: str, parent: str | None, reason: str = "", changed: dict | None = None
) -> dict:
    return {
        "id": name,
        "parent_id": parent,
        "fork_reason": reason,
        "changed": changed,
    }


def in_turn(turns: list[dict]) -> list[dict]:
    """Each begins after the one before has ended."""
    return [
        {**turn_row, "started_at": 2.0 * at, "finished_at": 2.0 * at + 1.0}
        for at, turn_row in enumerate(turns)
    ]


@pytest.mark.parametrize(
    ("turns", "unexplained"),
    [
        ([turn("1", None), turn("2", "1"), turn("3", "2")], []),
        ([turn("1", None), turn("2", None, "new_conversation"), turn("3", "1")], []),
        ([turn("1", None), turn("2", None, "context_edited", CHANGE)], []),
        (
            [turn("1", None), turn("2", None, "context_edited")],
            ["2: context_edited of what?"],
        ),
        ([turn("1", None), turn("2", None)], ["2: begins anew without a reason"]),
        (
            [turn("1", None), turn("2", "1"), turn("3", "1")],
            ["3: leaves its path without a reason"],
        ),
        (
            [turn("1", None), turn("2", "1"), turn("3", "1", "history_edited", CHANGE)],
            [],
        ),
    ],
)
def test_fork_without_a_reason_or_a_change_is_unexplained(
    turns: list[dict], unexplained: list[str]
):
    seen = Seen()
    seen.add(in_turn(turns))
    assert seen.unexplained == unexplained
    assert seen.turns == len(turns)


def test_titles_and_compaction_do_not_count_as_forks_in_fifty_turns():
    seen = Seen()
    path = [turn(str(at), str(at - 1) if at else None) for at in range(22)]
    reasons = ["new_conversation", "compacted", "history_edited"]
    seen.add(
        in_turn([*path, *(turn(reason, None, reason, CHANGE) for reason in reasons)])
    )
    assert seen.turns == 25
    assert seen.forks_in_50 == 2.0
    seen.add(in_turn([turn("a", None), turn("b", "a", "", CHANGE)]))
    assert seen.rewritten == 1
    assert seen.changed["rewritten"] == [CHANGE]


def test_two_concurrent_first_requests_are_not_a_fork():
    """There was no answer yet that the second could go on from. One that begins later
    has one."""
    first = turn("1", None) | {"started_at": 0.0, "finished_at": 2.0}
    beside = turn("2", None) | {"started_at": 1.0, "finished_at": 4.0}
    later = turn("3", None) | {"started_at": 3.0, "finished_at": 5.0}
    seen = Seen()
    seen.add([first, beside, later])
    assert seen.unexplained == ["3: begins anew without a reason"]
