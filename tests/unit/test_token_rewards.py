"""Where the rewards of a rollout are placed on the tokens of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from handmade_rollouts import rollout, summary, turn

from invrl.algorithms.advantage_rules import AdvantageRules
from invrl.algorithms.advantages import dr_grpo
from invrl.buffer.config import RewardUse
from invrl.buffer.token_rewards import token_rewards
from invrl.buffer.training_samples import build_batch
from invrl.errors import ConfigError
from invrl.types.batches import TakenBatch
from invrl.types.groups import Group
from invrl.types.rollouts import RolloutSummary
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion


def rewards_of(
    *paths: Sequence[Turn], of: RolloutSummary, use: RewardUse = "replace"
) -> list[list[float]]:
    """The column "rewards" of each row."""
    group = Group(id="g", task_id="t", rollouts_G=(of,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rules = AdvantageRules(token_level=True)
    rollouts = [rollout(*paths, of=of)]
    batch = build_batch(taken, rollouts, dr_grpo, 1e-4, use=use, rules=rules)
    columns = [sample.columns["rewards"] for sample in batch.samples]
    for sample, rewards_T in zip(batch.samples, columns, strict=True):
        assert rewards_T.dtype == np.float32
        assert not rewards_T[~sample.loss_mask_T].any()
    for advantages_T in batch.advantages:
        assert not advantages_T.any()
    return [rewards_T.tolist() for rewards_T in columns]


def test_final_reward_is_placed_at_the_last_trained_token() -> None:
    a = turn("a", None, [1, 2], [3, 4])
    b = turn("b", "a", [5], [6, 7])
    of = summary(reward=2.0)
    [rewards_T] = rewards_of([a, b], of=of)
    assert rewards_T == [0, 0, 0, 0, 0, 0, 2]
    undelivered = replace(b, delivered=False)
    [rewards_T] = rewards_of([a, undelivered], of=of)
    assert rewards_T == [0, 0, 0, 2]


def test_each_row_ends_with_the_reward_of_its_branch() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    of = replace(summary(reward=2.0), branch_rewards={"c": 0.5})
    first_T, second_T = rewards_of([a, b], [a, c], of=of)
    assert first_T == [0, 0, 0, 2]
    assert second_T == [0, 0, 0, 0.5]
    first_T, second_T = rewards_of([a, b], [a, c], of=of, use="add")
    assert first_T == [0, 0, 0, 2]
    assert second_T == [0, 0, 0, 2.5]


def test_turn_reward_is_placed_at_its_last_token_and_counts_once() -> None:
    a = turn("a", None, [1], [2, 9])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    of = replace(summary(reward=1.0), turn_rewards={"a": 0.25, "c": 0.5})
    first_T, second_T = rewards_of([a, b], [a, c], of=of)
    assert first_T == [0, 0, 0.25, 0, 1]
    assert second_T == [0, 0, 0, 0, 1.5]


def test_reward_of_an_untrained_turn_moves_to_the_trained_turn_before() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "b", [5], [6])
    b_untrained = replace(b, delivered=False)
    of = replace(summary(reward=1.0), turn_rewards={"b": 0.5})
    [rewards_T] = rewards_of([a, b_untrained, c], of=of)
    assert rewards_T == [0, 0.5, 0, 0, 0, 1]
    a_untrained = replace(a, delivered=False)
    of = replace(summary(reward=1.0), turn_rewards={"a": 0.5})
    [rewards_T] = rewards_of([a_untrained, b], of=of)
    assert rewards_T == [0, 0, 0, 1]


def test_child_sessions_have_their_own_token_rewards() -> None:
    main_path = [turn("a", None, [1], [2])]
    child_path = [replace(turn("k", None, [1], [2]), session_id="kid")]
    of = replace(
        summary(reward=1.0),
        child_rewards={"kid": 3.0},
        child_reward_from={"kid": "kid"},
    )
    main_T, child_T = rewards_of(main_path, child_path, of=of)
    assert main_T == [0, 1]
    assert child_T == [0, 3]
    main_T, child_T = rewards_of(main_path, child_path, of=of, use="add")
    assert main_T == [0, 1]
    assert child_T == [0, 4]
    heir = replace(of, child_rewards={"kid": 1.0}, child_reward_from={"kid": "s"})
    main_T, child_T = rewards_of(main_path, child_path, of=heir, use="add")
    assert main_T == [0, 1]
    assert child_T == [0, 1]


def test_reward_columns_are_added_on_trained_tokens() -> None:
    turns = [turn("a", None, [1], [2, 3])]
    of = summary(reward=1.0)
    column_T = np.array([9.0, 0.25, -1.0], np.float32)
    mask_T = np.array([False, True, True])
    rewards_T = token_rewards(of, turns, mask_T, columns=[column_T, column_T])
    assert rewards_T.tolist() == [0.0, 0.5, -1.0]
    untrained_T = np.zeros(3, np.bool_)
    rewards_T = token_rewards(of, turns, untrained_T, columns=[column_T])
    assert rewards_T.tolist() == [0.0, 0.0, 0.0]


def test_missing_reward_column_is_refused() -> None:
    of = summary()
    group = Group(id="g", task_id="t", rollouts_G=(of,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rollouts = [rollout([turn("a", None, [1], [2])], of=of)]
    rules = AdvantageRules(token_level=True, reward_columns=("progress",))
    with pytest.raises(ConfigError, match="reward_columns = 'progress'"):
        build_batch(taken, rollouts, dr_grpo, 1e-4, rules=rules)
