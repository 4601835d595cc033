"""Where the rewards of a rollout are placed on the tokens of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from handmade_rollouts import rollout, summary, turn

from invrl.algorithms.advantages import dr_grpo
from invrl.algorithms.credit import CreditRules
from invrl.buffer.config import RewardUse
from invrl.buffer.token_rewards import token_rewards
from invrl.buffer.training_samples import build_batch
from invrl.errors import ConfigError
from invrl.types import Group, RolloutSummary, TakenBatch, Turn, WeightVersion


def rewards_of(
    *paths: Sequence[Turn], of: RolloutSummary, use: RewardUse = "replace"
) -> list[list[float]]:
    """The column "rewards" of each row."""
    group = Group(id="g", task_id="t", rollouts_G=(of,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rules = CreditRules(token_level=True)
    batch = build_batch(
        taken, [rollout(*paths, of=of)], dr_grpo, 1e-4, use=use, rules=rules
    )
    for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True):
        assert sample.columns["rewards"].dtype == np.float32
        assert not sample.columns["rewards"][~sample.loss_mask_T].any()
        assert not advantages_T.any()
    return [sample.columns["rewards"].tolist() for sample in batch.samples]


def test_final_reward_is_placed_at_the_last_trained_token() -> None:
    a = turn("a", None, [1, 2], [3, 4])
    b = turn("b", "a", [5], [6, 7])
    assert rewards_of([a, b], of=summary(reward=2.0)) == [[0, 0, 0, 0, 0, 0, 2]]
    lost = replace(b, delivered=False)
    assert rewards_of([a, lost], of=summary(reward=2.0)) == [[0, 0, 0, 2]]


def test_each_row_ends_with_the_reward_of_its_branch() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    of = replace(summary(reward=2.0), branch_rewards={"c": 0.5})
    assert rewards_of([a, b], [a, c], of=of) == [[0, 0, 0, 2], [0, 0, 0, 0.5]]
    assert rewards_of([a, b], [a, c], of=of, use="add") == [
        [0, 0, 0, 2],
        [0, 0, 0, 2.5],
    ]


def test_turn_reward_is_placed_at_its_last_token_and_counts_once() -> None:
    a = turn("a", None, [1], [2, 9])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    of = replace(summary(reward=1.0), turn_rewards={"a": 0.25, "c": 0.5})
    assert rewards_of([a, b], [a, c], of=of) == [[0, 0, 0.25, 0, 1], [0, 0, 0, 0, 1.5]]


def test_reward_of_an_untrained_turn_moves_to_the_trained_turn_before() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4], delivered=False)
    c = turn("c", "b", [5], [6])
    of = replace(summary(reward=1.0), turn_rewards={"b": 0.5})
    assert rewards_of([a, b, c], of=of) == [[0, 0.5, 0, 0, 0, 1]]
    first = replace(a, delivered=False)
    of = replace(summary(reward=1.0), turn_rewards={"a": 0.5})
    assert rewards_of([first, replace(b, delivered=True)], of=of) == [[0, 0, 0, 1]]


def test_child_sessions_have_their_own_token_rewards() -> None:
    a = turn("a", None, [1], [2])
    k = replace(turn("k", None, [1], [2]), session_id="kid")
    of = replace(
        summary(reward=1.0),
        child_rewards={"kid": 3.0},
        child_reward_from={"kid": "kid"},
    )
    assert rewards_of([a], [k], of=of) == [[0, 1], [0, 3]]
    assert rewards_of([a], [k], of=of, use="add") == [[0, 1], [0, 4]]
    heir = replace(of, child_rewards={"kid": 1.0}, child_reward_from={"kid": "s"})
    assert rewards_of([a], [k], of=heir, use="add") == [[0, 1], [0, 1]]


def test_reward_columns_are_added_on_trained_tokens() -> None:
    turns = [turn("a", None, [1], [2, 3])]
    column_T = np.array([9.0, 0.25, -1.0], np.float32)
    mask_T = np.array([False, True, True])
    rewards_T = token_rewards(
        summary(reward=1.0), turns, mask_T, columns=[column_T, column_T]
    )
    assert rewards_T.tolist() == [0.0, 0.5, -1.0]
    nothing_T = token_rewards(
        summary(reward=1.0), turns, np.zeros(3, np.bool_), columns=[column_T]
    )
    assert nothing_T.tolist() == [0.0, 0.0, 0.0]


def test_missing_reward_column_is_refused() -> None:
    of = summary()
    group = Group(id="g", task_id="t", rollouts_G=(of,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    rules = CreditRules(token_level=True, reward_columns=("progress",))
    with pytest.raises(ConfigError, match="reward_columns = 'progress'"):
        build_batch(
            taken,
            [rollout([turn("a", None, [1], [2])], of=of)],
            dr_grpo,
            1e-4,
            rules=rules,
        )
