"""A policy that has collapsed is told once, with what helps; one that has solved its
tasks is not."""

from __future__ import annotations

import json
from pathlib import Path

from invrl.observe.metrics.collapse import collapse
from invrl.observe.status.run_status import RunReader
from invrl.run.settings.config import Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.viewer.viewed_run import ViewedRun


def row(
    step: int,
    distinct: int,
    *,
    deviation: float = 0.0,
    low: float = 0.0,
    high: float = 1.0,
) -> dict[str, float | None]:
    """A step of 8 groups of 8."""
    return {
        "step": step,
        "rollout/distinct_replies": distinct,
        "rollout/rollouts": 64,
        "rollout/groups": 8,
        "rollout/group_reward_std": deviation,
        "rollout/reward_min": low,
        "rollout/reward_max": high,
        "train/entropy": 0.1 * distinct / 8,
    }


HEALTHY = [row(step, 60, deviation=0.3) for step in (1, 2, 3)]
COLLAPSED = [*HEALTHY, *(row(step, 5) for step in (4, 5, 6))]


def test_a_collapse_names_its_step_its_signs_and_what_helps():
    text = collapse(COLLAPSED)
    assert (
        "since step 4 it gives one reply to each task (5 distinct replies of 64" in text
    )
    assert "entropy 0.75 -> 0.062 nats" in text
    for flag in ("--lr", "--kl.coefficient", "--entropy.coefficient"):
        assert flag in text


def test_one_or_two_such_steps_may_be_chance():
    assert not collapse(COLLAPSED[:5])
    assert not collapse([*COLLAPSED, row(7, 30, deviation=0.1)])


def test_equal_rewards_of_different_replies_are_no_collapse():
    assert not collapse([*HEALTHY, *(row(step, 40) for step in (4, 5, 6))])


def test_tasks_that_are_solved_are_no_collapse():
    assert not collapse([*HEALTHY, *(row(step, 8, low=1.0) for step in (4, 5, 6))])


def test_a_policy_that_was_so_from_the_beginning_has_not_collapsed():
    assert not collapse(COLLAPSED[3:])


def test_groups_of_one_and_rows_of_evaluations_say_nothing():
    alone = [{**step_row, "rollout/groups": 64} for step_row in COLLAPSED]
    assert not collapse(alone)
    assert collapse([{"step": 0, "eval/greedy/accuracy": 0.5}, *COLLAPSED])


def test_terminal_and_overview_tell_it(tmp_path: Path):
    tables = {"run": {"run_root": str(tmp_path), "run_name": "r"}}
    folder = make_run_folder(resolve(Source(name="test", tables=tables)))
    folder.metrics_path.write_text(
        "".join(json.dumps(step_row) + "\n" for step_row in COLLAPSED)
    )
    assert [note for note in RunReader(folder).read().notes if "collapsed" in note]
    viewed = ViewedRun("r", folder, tmp_path / "cache")
    viewed.metrics.refresh()
    assert [note for note in viewed.overview()["notes"] if "collapsed" in note]
