"""Where the rewards of a rollout are placed on the tokens of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from handmade_rollouts import rollout, summary, turn
from training_samples_example import batch_of_one

from invrl.algorithms.advantages.advantage_rules import AdvantageRules
from invrl.algorithms.advantages.advantages import dr_grpo
from invrl.algorithms.config import AlgorithmConfig
from invrl.buffer.config import RewardUse
from invrl.buffer.samples.token_rewards import token_rewards
from invrl.buffer.samples.training_samples import build_batch
from invrl.errors import ConfigError
from invrl.types.rollouts import RolloutSummary
from invrl.types.turns import Turn

ROOT = turn("root", None, [1], [2])
LEFT = turn("left", "root", [3], [4])
RIGHT = turn("right", "root", [5], [6])
"""Two branches that begin with the same turn."""


def rewards_of(
    *paths: Sequence[Turn],
    of: RolloutSummary,
    use: RewardUse = "replace",
) -> list[list[float]]:
    """The column "rewards" of each row."""
    batch = build_batch(
        batch_of_one(of),
        [rollout(*paths, of=of)],
        dr_grpo,
        1e-4,
        use=use,
        rules=AdvantageRules(algorithm=AlgorithmConfig(advantage="gae")),
    )
    for advantages_T in batch.advantages:
        assert not advantages_T.any()
    rewards: list[list[float]] = []
    for sample in batch.samples:
        rewards_T = sample.columns["rewards"]
        assert rewards_T.dtype == np.float32
        assert not rewards_T[~sample.loss_mask_T].any()
        rewards.append(rewards_T.tolist())
    return rewards


def test_final_reward_is_placed_at_the_last_trained_token() -> None:
    first = turn("first", None, [1, 2], [3, 4])
    second = turn("second", "first", [5], [6, 7])
    scored = summary(reward=2.0)
    [rewards_T] = rewards_of([first, second], of=scored)
    assert rewards_T == [0, 0, 0, 0, 0, 0, 2]


def test_final_reward_is_not_placed_on_an_undelivered_turn() -> None:
    first = turn("first", None, [1, 2], [3, 4])
    undelivered = turn(
        "second",
        "first",
        [5],
        [6, 7],
        delivered=False,
    )
    scored = summary(reward=2.0)
    [rewards_T] = rewards_of([first, undelivered], of=scored)
    assert rewards_T == [0, 0, 0, 2]


@pytest.mark.parametrize(
    ("use", "last_of_right"),
    [
        ("replace", 0.5),
        ("add", 2.5),
    ],
)
def test_each_sample_ends_with_the_reward_of_its_trajectory(
    use: RewardUse,
    last_of_right: float,
) -> None:
    scored = replace(
        summary(reward=2.0),
        branch_rewards={"right": 0.5},
    )
    left_T, right_T = rewards_of(
        [ROOT, LEFT],
        [ROOT, RIGHT],
        of=scored,
        use=use,
    )
    assert left_T == [0, 0, 0, 2]
    assert right_T == [0, 0, 0, last_of_right]


def test_turn_reward_is_placed_at_its_last_token_and_counts_once() -> None:
    root = turn("root", None, [1], [2, 9])
    scored = replace(
        summary(reward=1.0),
        turn_rewards={"root": 0.25, "right": 0.5},
    )
    left_T, right_T = rewards_of(
        [root, LEFT],
        [root, RIGHT],
        of=scored,
    )
    assert left_T == [0, 0, 0.25, 0, 1]
    assert right_T == [0, 0, 0, 0, 1.5]


def test_reward_of_an_untrained_turn_moves_to_the_trained_turn_before() -> None:
    last = turn("last", "left", [5], [6])
    scored = replace(
        summary(reward=1.0),
        turn_rewards={"left": 0.5},
    )
    untrained = replace(LEFT, delivered=False)
    [rewards_T] = rewards_of([ROOT, untrained, last], of=scored)
    assert rewards_T == [0, 0.5, 0, 0, 0, 1]


def test_reward_of_an_untrained_first_turn_is_lost() -> None:
    scored = replace(
        summary(reward=1.0),
        turn_rewards={"root": 0.5},
    )
    untrained = replace(ROOT, delivered=False)
    [rewards_T] = rewards_of([untrained, LEFT], of=scored)
    assert rewards_T == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("rewarded_by", "child_reward", "use", "last_of_child"),
    [
        ("child", 3.0, "replace", 3),
        ("child", 3.0, "add", 4),
        ("s", 1.0, "add", 1),  # the reward of its parent
    ],
)
def test_child_sessions_have_their_own_token_rewards(
    rewarded_by: str,
    child_reward: float,
    use: RewardUse,
    last_of_child: float,
) -> None:
    child = replace(ROOT, id="c", session_id="child")
    scored = replace(
        summary(reward=1.0),
        child_rewards={"child": child_reward},
        child_reward_from={"child": rewarded_by},
    )
    main_T, child_T = rewards_of(
        [ROOT],
        [child],
        of=scored,
        use=use,
    )
    assert main_T == [0, 1]
    assert child_T == [0, last_of_child]


def test_reward_columns_are_added_on_trained_tokens() -> None:
    turns = [turn("root", None, [1], [2, 3])]
    column_T = np.array([9.0, 0.25, -1.0], np.float32)
    trained_T = np.array([False, True, True])
    rewards_T = token_rewards(
        summary(reward=1.0),
        turns,
        trained_T,
        columns=[column_T, column_T],
    )
    assert rewards_T.tolist() == [0.0, 0.5, -1.0]


def test_sample_without_a_trained_token_has_no_rewards() -> None:
    turns = [turn("root", None, [1], [2, 3])]
    column_T = np.array([9.0, 0.25, -1.0], np.float32)
    untrained_T = np.zeros(3, np.bool_)
    rewards_T = token_rewards(
        summary(reward=1.0),
        turns,
        untrained_T,
        columns=[column_T],
    )
    assert rewards_T.tolist() == [0.0, 0.0, 0.0]


def test_missing_reward_column_is_refused() -> None:
    algorithm = AlgorithmConfig(advantage="gae", reward_columns=("progress",))
    rules = AdvantageRules(algorithm=algorithm)
    taken = batch_of_one(summary())
    rollouts = [rollout([ROOT])]
    with pytest.raises(ConfigError, match="reward_columns = 'progress'"):
        build_batch(taken, rollouts, dr_grpo, 1e-4, rules=rules)
