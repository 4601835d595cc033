"""An evaluation in which everything fails says so at once and ends; one in which
something works goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_buffer import failure, summary

from invrl.buffer.config import BufferConfig
from invrl.errors import IdenticalFailuresError
from invrl.rollout.dispatch.evaluation import EvalScore
from invrl.run.loop.failed_rollouts import EvaluationFailures
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import FailedRollout


class Watched:
    def __init__(self, at_start: int = 4) -> None:
        self.told: list[str] = []
        rules = BufferConfig().failures.rules()
        self.watch = EvaluationFailures(
            at_start=at_start, rules=rules, warn=self.told.append
        )

    def fail(self, group: str, reason: str = "exception") -> None:
        self.watch.ended(group, [broken(group, reason)])


def broken(group: str, reason: str = "exception") -> FailedRollout:
    detail = "KeyError: 'awnser'\nat my_agent.py:8, in rollout: return 1"
    return replace(failure(group, 0), reason=FailureReason(reason), detail=detail)


def test_first_evaluation_failure_is_reported_at_once_and_the_fourth_ends_the_evaluation() -> (
    None
):
    watched = Watched()
    for number in range(4):
        watched.watch.began(f"e{number}")
    watched.fail("e0")
    assert watched.told == [
        "evaluation: warning: the first rollout that failed (exception):\n    KeyError: 'awnser'\n"
        "    at my_agent.py:8, in rollout: return 1"
    ]
    watched.fail("e1")
    watched.fail("e2")
    with pytest.raises(
        IdenticalFailuresError,
        match=r"all 4 rollouts so far failed .exception.*my_agent.py:8",
    ):
        watched.fail("e3")


@pytest.mark.parametrize(
    "but", ["one finished", "one still runs", "the model's own", "no limit"]
)
def test_evaluation_continues_unless_every_rollout_has_failed(but: str) -> None:
    watched = Watched(at_start=0 if but == "no limit" else 4)
    watched.watch.began("slow")
    if but != "one still runs":
        watched.watch.ended(
            "slow", [summary("slow", 0)] if but == "one finished" else []
        )
    for number in range(20):
        watched.watch.began(f"e{number}")
        watched.fail(
            f"e{number}", "timeout" if but == "the model's own" else "exception"
        )
    assert len(watched.told) >= 1


def test_score_line_counts_failures_by_reason() -> None:
    from invrl.cli.commands.evaluate import score_note

    score = EvalScore(
        mode="greedy",
        task_ids=("a", "b"),
        rewards=((0.0,), (0.0,)),
        failures={"exception": 2},
        failure_detail="boom",
    )
    assert score_note(score).startswith(
        "greedy: mean reward 0.000; greedy: 2 of 2 rollouts failed and score 0 (2 exception)"
    )
    assert score_note(replace(score, failures={})) == "greedy: mean reward 0.000"
