"""Batches whose rewards are shaped, whose rollouts are left out, or which are compared
and whitened as a whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from handmade_rollouts import rollout, summary, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.algorithms.advantages.advantage_rules import advantage_rules
from invrl.algorithms.advantages.advantages import configured_advantage
from invrl.algorithms.config import AlgorithmConfig
from invrl.buffer.config import RewardUse
from invrl.buffer.samples.training_samples import build_batch
from invrl.observe.metrics.step_metrics import shaping_metrics
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.groups import Group
from invrl.types.reasons import FailureReason
from invrl.types.rollouts import Rollout, RolloutSummary
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion


def built(
    *groups: Sequence[RolloutSummary],
    num_branches: int = 1,
    use: RewardUse = "replace",
    max_new_tokens: int = 100,
    **settings: object,
) -> TrainBatch:
    """Each rollout has a row of two sampled tokens for each branch."""
    algorithm = AlgorithmConfig.model_validate(settings)
    taken_groups = [
        Group(id=members[0].group_id, task_id="t", rollouts_G=tuple(members))
        for members in groups
    ]
    rollouts: list[Rollout] = []
    for members in groups:
        for member in members:
            paths = [
                [turn(f"{member.session_id}.{n}", None, [1], [2, 3])]
                for n in range(num_branches)
            ]
            rollouts.append(rollout(*paths, of=member))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=tuple(taken_groups))
    rules = advantage_rules(algorithm, max_new_tokens)
    return build_batch(
        taken,
        rollouts,
        configured_advantage(algorithm),
        algorithm.advantage_std.eps,
        use=use,
        rules=rules,
    )


def members(name: str, rewards: Sequence[float]) -> list[RolloutSummary]:
    return [summary(f"{name}.{n}", name, n, reward) for n, reward in enumerate(rewards)]


def test_samples_record_whether_their_rollout_solved_its_task() -> None:
    """By the environment's reward, before it is shaped, on every row of the rollout."""
    group = members("g", [0.0, 0.5, 1.0])
    algorithm = AlgorithmConfig(solved_nll_coef=0.1, length_penalty=5.0)
    rules = advantage_rules(algorithm, 100, success_reward=0.5)
    taken = TakenBatch(
        batch_id=0,
        version=WeightVersion(0),
        groups=(Group(id="g", task_id="t", rollouts_G=tuple(group)),),
    )
    rollouts = [
        rollout(
            *[[turn(f"{of.session_id}.{n}", None, [1], [2, 3])] for n in range(2)],
            of=of,
        )
        for of in group
    ]
    batch = build_batch(
        taken, rollouts, configured_advantage(algorithm), 1e-4, rules=rules
    )
    assert [sample.numbers["solved"] for sample in batch.samples] == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert batch.trained.solved_tokens == 8
    assert batch.trained.tokens == 12
    plain = build_batch(taken, rollouts, configured_advantage(algorithm), 1e-4)
    assert not any("solved" in sample.numbers for sample in plain.samples)


def firsts(batch: TrainBatch) -> list[float]:
    """The advantage of each row's trained tokens, which is one."""
    for advantages_T in batch.advantages:
        assert advantages_T[0] == 0.0
        assert advantages_T[1] == advantages_T[2]
    return [float(advantages_T[1]) for advantages_T in batch.advantages]


def test_reinforce_baseline_is_over_the_batch() -> None:
    """Rewards 0 0 and 3: the mean of the batch is 1, and a group of one has an
    advantage too."""
    batch = built(members("g", [0.0, 0.0]), members("h", [3.0]), advantage="reinforce")
    assert firsts(batch) == [-1.0, -1.0, 2.0]


def test_reinforce_counts_a_rollout_once_for_any_number_of_samples() -> None:
    first = members("g", [0.0, 0.0])
    second = members("h", [3.0])
    batch = built(first, second, advantage="reinforce", num_branches=3)
    assert firsts(batch) == [-1.0] * 6 + [2.0] * 3


def test_reinforce_pp_whitens_the_raw_reward_over_tokens() -> None:
    """Three rows of two tokens: 0 0 0 0 3 3."""
    batch = built(
        members("g", [0.0, 0.0]), members("h", [3.0]), advantage="reinforce_pp"
    )
    deviation = math.sqrt(12 / 5 + 1e-8)
    assert firsts(batch) == pytest.approx(
        [-1 / deviation, -1 / deviation, 2 / deviation]
    )


def test_reinforce_pp_baseline_subtracts_the_group_mean_first() -> None:
    batch = built(
        members("g", [0.0, 2.0]),
        members("h", [5.0, 5.0]),
        advantage="reinforce_pp_baseline",
    )
    deviation = math.sqrt(4 / 7 + 1e-8)
    assert firsts(batch) == pytest.approx([-1 / deviation, 1 / deviation, 0.0, 0.0])


@pytest.mark.parametrize(
    "advantage", ["reinforce", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_batch_of_equal_rewards_has_exactly_zero_advantages(advantage: str) -> None:
    batch = built(members("g", [0.1] * 4), members("h", [0.1] * 3), advantage=advantage)
    assert firsts(batch) == [0.0] * 7


@settings(max_examples=50, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    advantage=st.sampled_from(
        ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce", "reinforce_pp"]
    ),
    order=st.randoms(use_true_random=False),
)
def test_groups_are_defined_by_ids_and_not_by_positions(
    groups: list[list[float]], advantage: str, order: object
) -> None:
    """Groups and their members in another order have the same advantages by session."""
    named = [members(f"g{n}", rewards) for n, rewards in enumerate(groups)]
    batch = built(*named, advantage=advantage)
    by_session = {
        sample.rollout_id: first
        for sample, first in zip(batch.samples, firsts(batch), strict=True)
    }
    shuffled = [list(group) for group in named]
    for group in shuffled:
        order.shuffle(group)  # type: ignore[attr-defined]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    batch = built(*shuffled, advantage=advantage)
    for sample, first in zip(batch.samples, firsts(batch), strict=True):
        assert first == pytest.approx(by_session[sample.rollout_id], rel=1e-6, abs=1e-6)


# ----------------------------------------------------------------- left out


def failed(member: RolloutSummary) -> RolloutSummary:
    return replace(member, failure=FailureReason("timeout"))


def test_failed_rollout_is_trained_or_only_counted_or_left_out() -> None:
    """Rewards 1, 2 and a failure that counts 0."""
    first, second, third = members("g", [1.0, 2.0, 0.0])
    group = [first, second, failed(third)]
    assert firsts(built(group, advantage="dr_grpo")) == [0.0, 1.0, -1.0]
    assert firsts(built(group, advantage="dr_grpo", failed_rollouts="baseline")) == [
        0.0,
        1.0,
    ]
    assert firsts(built(group, advantage="dr_grpo", failed_rollouts="leave_out")) == [
        -0.5,
        0.5,
    ]
    batch = built(
        [failed(first), failed(second)],
        advantage="dr_grpo",
        failed_rollouts="leave_out",
    )
    assert batch.samples == ()


def test_stricter_rule_applies_to_a_truncated_failed_rollout() -> None:
    first, second, third = members("g", [1.0, 2.0, 0.0])
    cut = replace(third, truncated=True)
    assert firsts(
        built([first, second, cut], advantage="dr_grpo", failed_rollouts="leave_out")
    ) == [0, 1, -1]
    assert firsts(
        built([first, second, cut], advantage="dr_grpo", truncated_rollouts="baseline")
    ) == [0, 1]
    both = failed(cut)
    batch = built(
        [first, second, both],
        advantage="dr_grpo",
        truncated_rollouts="baseline",
        failed_rollouts="leave_out",
    )
    assert firsts(batch) == [-0.5, 0.5]


# ----------------------------------------------------------------- shaping


def test_shaping_changes_the_advantage_and_not_the_recorded_reward() -> None:
    """Both are right; the second is 90 tokens long, with a limit of 100 and a buffer of
    20: it loses 0.5."""
    first, second = members("g", [1.0, 1.0])
    group = [
        replace(first, sampled_tokens=10),
        replace(second, sampled_tokens=90),
    ]
    batch = built(group, advantage="dr_grpo", overlong={"buffer": 20})
    assert firsts(batch) == [0.25, -0.25]
    assert [sample.reward for sample in batch.samples] == [1.0, 1.0]
    values = {name: metric.value() for name, metric in shaping_metrics(batch).items()}
    assert values == {
        "reward_shaping_mean": -0.25,
        "reward_shaping_min": -0.5,
        "reward_shaping_max": 0.0,
        "reward_shaped_share": 0.5,
    }
    longer = built(group, advantage="dr_grpo", overlong={"buffer": 20, "length": 120})
    assert firsts(longer) == [0.0, 0.0]


def test_shaping_metrics_exist_only_with_shaping() -> None:
    batch = built(members("g", [0.0, 1.0]), advantage="dr_grpo")
    assert shaping_metrics(batch) == {}
    assert dict(batch.samples[0].numbers) == {}


def test_length_reward_compares_only_rollouts_that_count() -> None:
    first, second, third = members("g", [1.0, 1.0, 0.0])
    group = [
        replace(first, sampled_tokens=10),
        replace(second, sampled_tokens=20),
        failed(replace(third, sampled_tokens=1000)),
    ]
    batch = built(
        group, advantage="dr_grpo", length_penalty=1.0, failed_rollouts="leave_out"
    )
    assert firsts(batch) == [0.5, -0.5]


# ----------------------------------------------------------------- discount


def test_turn_reward_is_discounted_per_turn_in_between() -> None:
    """One rollout of three turns, raw rewards: final 4, turns 1, 2 and 0, discount
    1/2."""
    ids = ["a", "b", "c"]
    path: list[Turn] = [
        turn(id, parent, [1], [2])
        for id, parent in zip(ids, [None, "a", "b"], strict=True)
    ]
    of = replace(summary(reward=4.0), turn_rewards={"a": 1.0, "b": 2.0})
    group = Group(id="g", task_id="t", rollouts_G=(of,))
    taken = TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))
    algorithm = AlgorithmConfig(advantage="raw", discount=0.5)
    batch = build_batch(
        taken,
        [rollout(path, of=of)],
        configured_advantage(algorithm),
        1e-4,
        use="add",
        rules=advantage_rules(algorithm, 100),
    )
    [advantages_T] = batch.advantages
    assert advantages_T[1::2].tolist() == [1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4]
    assert advantages_T.dtype == np.float32
