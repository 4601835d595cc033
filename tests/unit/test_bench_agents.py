"""The bench of agents tells a fork that is explained from one that is not."""

from __future__ import annotations

import pytest
from bench.agents import Seen

CHANGE = {"message": 0, "role": "system", "part": "content", "recorded": "a", "sent": "b"}


def turn(name: str, parent: str | None, reason: str = "", changed: dict | None = None) -> dict:
    return {"id": name, "parent_id": parent, "fork_reason": reason, "changed": changed}


@pytest.mark.parametrize(
    ("turns", "unexplained"),
    [
        ([turn("1", None), turn("2", "1"), turn("3", "2")], []),
        ([turn("1", None), turn("2", None, "new_conversation"), turn("3", "1")], []),
        ([turn("1", None), turn("2", None, "context_edited", CHANGE)], []),
        ([turn("1", None), turn("2", None, "context_edited")], ["2: context_edited of what?"]),
        ([turn("1", None), turn("2", None)], ["2: begins anew without a reason"]),
        (
            [turn("1", None), turn("2", "1"), turn("3", "1")],
            ["3: leaves its path without a reason"],
        ),
        ([turn("1", None), turn("2", "1"), turn("3", "1", "history_edited", CHANGE)], []),
    ],
)
def test_what_is_unexplained(turns: list[dict], unexplained: list[str]):
    seen = Seen()
    seen.add(turns)
    assert (seen.unexplained, seen.turns) == (unexplained, len(turns))


def test_titles_and_compaction_do_not_count_as_forks_in_fifty_turns():
    seen = Seen()
    path = [turn(str(at), str(at - 1) if at else None) for at in range(22)]
    reasons = ["new_conversation", "compacted", "history_edited"]
    seen.add([*path, *(turn(reason, None, reason, CHANGE) for reason in reasons)])
    assert (seen.turns, seen.forks_in_50) == (25, 2.0)
    seen.add([turn("a", None), turn("b", "a", "", CHANGE)])
    assert (seen.rewritten, seen.changed["rewritten"]) == (1, [CHANGE])
