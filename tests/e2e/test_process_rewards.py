"""Numbers that a rollout attaches to its tokens reach a user's objective at those
tokens, through gateway, store, batch and packing; a curriculum is told how its tasks
went."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.runs import DEADLINE_S, steps_of, train

pytestmark = pytest.mark.slow


@pytest.mark.timeout(DEADLINE_S)
def test_an_objective_learns_from_process_rewards_of_tokens(folder: Path) -> None:
    """The change was 0.53; with the numbers one token too early it was -0.03."""
    run = train(
        folder,
        "process-rewards",
        *("--num-steps", "16", "--session.extra-columns", "process_reward:token"),
        *("--rollout-function-path", "tests.e2e.process_rewards:rollout"),
        *("--objective", "tests.e2e.process_rewards:reinforced"),
        *("--curriculum", "thompson", "--curriculum.tasks", "8"),
    )
    rewards = [row["rollout/reward_mean"] for row in steps_of(run)]
    assert len(rewards) == 16
    assert sum(rewards[-4:]) / 4 - sum(rewards[:4]) / 4 > 0.2
