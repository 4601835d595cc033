"""From turns to rows: which token is trained where, with which log-prob, version and
advantage."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from handmade_rollouts import branches, forests, rollout, summary, taken, turn
from hypothesis import given, settings
from training_samples_example import training_rows

from invrl.algorithms.advantages.advantages import dr_grpo, grpo
from invrl.buffer.config import RewardBaseline, RewardUse
from invrl.buffer.groups.group_filters import nonzero_variance
from invrl.buffer.samples.training_samples import build_batch
from invrl.errors import BufferStateError, PluginError, RunStoreError
from invrl.interfaces import AdvantageFn
from invrl.observe.metrics.step_metrics import token_age_metrics
from invrl.types.batches import TakenBatch, TrainBatch
from invrl.types.groups import Group
from invrl.types.metrics import resolve
from invrl.types.rollouts import Rollout
from invrl.types.turns import Turn
from invrl.types.weights import WeightVersion


def test_one_trajectory_is_one_sample() -> None:
    a = turn("a", None, [1, 2], [3, 4], version=0)
    b = turn("b", "a", [5], [6], version=1)
    (row,) = training_rows(rollout([a, b]))
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask_T.tolist() == [False, False, True, True, False, True]
    logprobs = [0, 0, -0.03, -0.04, 0, -0.06]
    assert row.rollout_logprobs_T.tolist() == pytest.approx(logprobs)
    assert row.versions_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.turn_ids == ("a", "b")
    assert row.group_id == "g"
    assert row.rollout_id == "s"
    assert row.attempt == 2
    assert row.tokens_T.dtype == np.int32
    assert row.rollout_logprobs_T.dtype == np.float32
    assert row.versions_T.dtype == np.int32


def test_a_shared_turn_is_trained_in_the_first_trajectory_only() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    first, second = training_rows(rollout([a, b], [a, c]))
    assert first.tokens_T[first.loss_mask_T].tolist() == [2, 4]
    assert second.tokens_T.tolist() == [1, 2, 5, 6]
    assert second.tokens_T[second.loss_mask_T].tolist() == [6]
    assert second.rollout_logprobs_T.tolist() == pytest.approx([0, 0, 0, -0.06])
    assert second.versions_T.tolist() == [-1, -1, -1, 0]


def test_an_undelivered_or_aborted_leaf_is_cut_off() -> None:
    a = turn("a", None, [1], [2])
    lost = turn("b", "a", [3], [4], delivered=False)
    aborted = turn("c", "a", [5], [6], finish="abort")
    (row,) = training_rows(rollout([a, lost], [a, aborted]))
    assert row.tokens_T.tolist() == [1, 2]


def test_trajectory_cut_at_an_undelivered_leaf_is_dropped_if_a_longer_trajectory_contains_it() -> (
    None
):
    a = turn("a", None, [1], [2])
    lost = turn("b", "a", [3], [4], delivered=False)
    c = turn("c", "a", [5], [6])
    (row,) = training_rows(rollout([a, lost], [a, c]))
    assert row.turn_ids == ("a", "c")
    assert row.tokens_T[row.loss_mask_T].tolist() == [2, 6]


def test_an_undelivered_inner_turn_is_context() -> None:
    a = turn("a", None, [1], [2], delivered=False)
    b = turn("b", "a", [3], [4])
    (row,) = training_rows(rollout([a, b]))
    assert row.tokens_T.tolist() == [1, 2, 3, 4]
    assert row.loss_mask_T.tolist() == [False, False, False, True]


def test_the_first_token_is_never_trained() -> None:
    (row,) = training_rows(rollout([turn("a", None, [], [7, 8])]))
    assert row.loss_mask_T.tolist() == [False, True]
    assert row.versions_T.tolist() == [-1, 0]
    assert training_rows(rollout([turn("a", None, [], [7])])) == []


def test_a_rollout_without_trained_tokens_has_no_sample() -> None:
    assert training_rows(rollout([turn("a", None, [1], [2], delivered=False)])) == []
    assert training_rows(rollout([turn("a", None, [1], [])])) == []
    assert training_rows(rollout()) == []


def test_several_temperatures_in_a_row_are_refused() -> None:
    a = turn("a", None, [1], [2], temperature=1.0)
    b = turn("b", "a", [3], [4], temperature=0.5)
    with pytest.raises(BufferStateError, match="several temperatures"):
        training_rows(rollout([a, b]))


def ids_of_turn(turn: Turn) -> list[int]:
    return [*turn.context_ids_T.tolist(), *turn.sampled_ids_T.tolist()]


@settings(max_examples=200, deadline=None)
@given(turns=forests())
def test_every_trainable_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    rows = training_rows(rollout(*branches(turns)))
    trained: Counter[int] = Counter()
    for row in rows:
        trained.update(row.tokens_T[row.loss_mask_T].tolist())
    trainable: Counter[int] = Counter()
    for drawn_turn in turns:
        if drawn_turn.delivered and drawn_turn.finish_reason != "abort":
            trainable.update(drawn_turn.sampled_ids_T.tolist())
    assert trained == trainable
    turns_by_id = {turn.id: turn for turn in turns}
    for row in rows:
        path = [turns_by_id[id] for id in row.turn_ids]
        assert row.tokens_T.tolist() == list(chain(*map(ids_of_turn, path)))
        mask_T = row.loss_mask_T
        assert mask_T.any()
        trained_N = row.tokens_T[mask_T]
        logprobs_N = row.rollout_logprobs_T[mask_T]
        assert logprobs_N.tolist() == pytest.approx((trained_N / -100).tolist())
        version_by_token: dict[int, int] = {}
        for path_turn in path:
            sampled = path_turn.sampled_ids_T.tolist()
            version_by_token.update(zip(sampled, path_turn.versions_T, strict=True))
        versions = [version_by_token[token] for token in trained_N.tolist()]
        assert row.versions_T[mask_T].tolist() == versions
        assert (row.versions_T[~mask_T] == -1).all()
        assert (row.rollout_logprobs_T[~mask_T] == 0).all()


# ----------------------------------------------------------------- old tokens


def batch_of_two_ages(*, masks_stale: bool) -> TrainBatch:
    """A batch of version 7: a conversation of turns of versions 4 and 6, and one of
    version 3; tokens may be two versions old."""
    batch = taken(("g", [0.0, 1.0]))
    first, second = batch.groups[0].rollouts_G
    a = turn("a", None, [1], [2, 3], version=4)
    b = turn("b", "a", [4], [5], version=6)
    old = turn("c", None, [6], [7], version=3)
    rollouts = [rollout([a, b], of=first), rollout([old], of=second)]
    return build_batch(
        batch, rollouts, dr_grpo, 1e-4, max_staleness=2, masks_stale=masks_stale
    )


def test_old_tokens_are_context_where_they_are_masked() -> None:
    batch = batch_of_two_ages(masks_stale=True)
    (sample,) = batch.samples
    assert sample.tokens_T.tolist() == [1, 2, 3, 4, 5]
    assert sample.loss_mask_T.tolist() == [False] * 4 + [True]
    assert sample.versions_T.tolist() == [-1] * 4 + [6]
    assert sample.rollout_logprobs_T[:4].tolist() == [0] * 4
    assert [row_T.tolist() for row_T in batch.advantages] == [[0, 0, 0, 0, -0.5]], (
        "the rollout without a token left still counts in the baseline"
    )


@pytest.mark.parametrize("masks_stale", [True, False])
def test_ages_of_a_batch_include_its_masked_tokens(masks_stale: bool) -> None:
    batch = batch_of_two_ages(masks_stale=masks_stale)
    assert batch.ages is not None
    assert batch.ages.tokens == {1: 1, 3: 2, 4: 1}
    assert resolve(token_age_metrics(batch)) == {
        "token_age_mean": 11 / 4,
        "token_age_p99": 4,
        "token_age_beyond_share": 3 / 4,
        "tokens_masked": 3 if masks_stale else 0,
        "samples_masked": 1 if masks_stale else 0,
    }
    trained = 1 if masks_stale else 4
    assert sum(int(sample.loss_mask_T.sum()) for sample in batch.samples) == trained


# ----------------------------------------------------------------- batches


def test_a_rollout_of_two_samples_counts_once_in_the_baseline() -> None:
    """Rewards 0, 0, 3: the mean is 1, though the rollout with 3 has two rows of three
    tokens in all."""
    batch = taken(("g", [0.0, 0.0, 3.0]))
    a = turn("a", None, [1], [2, 3])
    b = turn("b", "a", [4], [5])
    c = turn("c", "a", [6], [7])
    undelivered = turn("x", None, [1], [9], delivered=False)
    first, second, third = batch.groups[0].rollouts_G
    rollouts = [
        rollout([a], of=first),
        rollout([undelivered], of=second),
        rollout([a, b], [a, c], of=third),
    ]
    train_batch = build_batch(batch, reversed(rollouts), dr_grpo, 1e-4)
    rollout_ids = [sample.rollout_id for sample in train_batch.samples]
    assert rollout_ids == ["g.0", "g.2", "g.2"]
    assert [row_T.tolist() for row_T in train_batch.advantages] == [
        [0, -1, -1],
        [0, 2, 2, 0, 2],
        [0, 0, 0, 0, 2],
    ]
    assert train_batch.batch_id == 4
    assert train_batch.version == 7
    assert train_batch.trained.tokens == 6
    assert all(row_T.dtype == np.float32 for row_T in train_batch.advantages)


def test_sample_takes_the_trajectory_reward_of_its_last_rewarded_turn() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    own = replace(summary(reward=1.0), branch_rewards={"a": 0.5, "c": 0.25})
    rows = training_rows(rollout([a, b], [a, c], of=own))
    assert [row.reward for row in rows] == [0.5, 0.25]


def test_untrained_roots_make_no_samples() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", None, [5], [6])
    of = replace(summary(), untrained_roots=("a",))
    (row,) = training_rows(rollout([a, b], [c], of=of))
    assert row.turn_ids == ("c",)


def test_group_with_equal_final_rewards_trains_if_turn_rewards_differ() -> None:
    (group,) = taken(("g", [1.0, 1.0])).groups
    assert nonzero_variance(group) == "zero_variance"
    first, second = group.rollouts_G
    rewarded_ids = [
        ("turn_rewards", "a", "b"),
        ("branch_rewards", "a", "b"),
        ("child_rewards", "k", "l"),
    ]
    for rewards, first_id, second_id in rewarded_ids:
        first_rewarded = replace(first, **{rewards: {first_id: 0.0}})
        alone = replace(group, rollouts_G=(first_rewarded, second))
        assert nonzero_variance(alone) == "zero_variance", (
            "there is nothing to compare it with"
        )
        second_rewarded = replace(second, **{rewards: {second_id: 0.5}})
        differing = replace(group, rollouts_G=(first_rewarded, second_rewarded))
        assert nonzero_variance(differing) is None


def test_groups_have_their_own_baselines() -> None:
    batch = taken(("g", [0.0, 1.0]), ("h", [5.0, 5.0, 8.0]))
    path = [turn("a", None, [1], [2])]
    rollouts = [
        rollout(path, of=member)
        for group in batch.groups
        for member in group.rollouts_G
    ]
    train_batch = build_batch(batch, rollouts, grpo, 1e-9)
    advantages = [float(row_T[1]) for row_T in train_batch.advantages]
    root_half = math.sqrt(1 / 2)
    root_third = math.sqrt(1 / 3)
    assert advantages == pytest.approx(
        [
            -root_half,
            root_half,
            -root_third,
            -root_third,
            2 * root_third,
        ],
        rel=1e-6,
    )


def test_rollout_without_its_tokens_is_an_invariant_error() -> None:
    with pytest.raises(RunStoreError, match=r"no tokens for session g\.0"):
        build_batch(taken(("g", [1.0])), [], grpo, 1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(3),
        np.array([np.nan, 0.0]),
        np.float64(0.0),
    ],
)
def test_return_value_of_a_user_advantage_is_checked(wrong: np.ndarray) -> None:
    batch = taken(("g", [0.0, 1.0]))
    with pytest.raises(PluginError, match="one finite advantage per reward"):
        build_batch(batch, [], lambda rewards_G, *, eps: wrong, 1e-4)


# -------------------------------------------- rewards of turns, branches and children


def batch_of_group(rollouts: Sequence[Rollout]) -> TakenBatch:
    members = tuple(rollout.summary for rollout in rollouts)
    group = Group(id="g", task_id="t", rollouts_G=members)
    return TakenBatch(batch_id=0, version=WeightVersion(0), groups=(group,))


def judged(
    finals: Sequence[float],
    turn_rewards: Sequence[Sequence[float | None]],
    *,
    baseline: RewardBaseline = "depth",
    use: RewardUse = "replace",
    advantage_fn: AdvantageFn = grpo,
) -> list[list[float]]:
    """The advantage of each turn of each rollout: rollout i is one branch, its turn k
    earns `turn_rewards[i][k]` (None: nothing of its own)."""
    rollouts: list[Rollout] = []
    for i, (final, rewards) in enumerate(zip(finals, turn_rewards, strict=True)):
        path: list[Turn] = []
        reward_by_turn: dict[str, float] = {}
        levels: dict[str, str] = {}
        parent: str | None = None
        for k, reward in enumerate(rewards):
            id = f"r{i}t{k}"
            path.append(turn(id, parent, [1], [2]))
            parent = id
            if reward is not None:
                reward_by_turn[id] = reward
                levels[id] = f"main/{k}"
        member = replace(
            summary(f"g.{i}", "g", i, final),
            turn_rewards=reward_by_turn,
            turn_levels=levels,
        )
        rollouts.append(rollout(path, of=member))
    batch = batch_of_group(rollouts)
    train_batch = build_batch(
        batch, rollouts, advantage_fn, 1e-4, baseline=baseline, use=use
    )
    [group] = batch.groups
    differ = nonzero_variance(group, baseline=baseline) is None
    assert differ == any(row_T.any() for row_T in train_batch.advantages)
    return [row_T[1::2].tolist() for row_T in train_batch.advantages]


ALL_WAYS = [
    (baseline, use) for baseline in ("depth", "group") for use in ("replace", "add")
]


@pytest.mark.parametrize(("baseline", "use"), ALL_WAYS)
def test_equal_turn_rewards_in_a_failed_group_give_zero_advantages(
    baseline: RewardBaseline, use: RewardUse
) -> None:
    """All eight fail, all eight turns earn 0.1. Compared with the final rewards each
    had +2.64."""
    finals = [0.0] * 8
    turn_rewards = [[0.1]] * 8
    advantages = judged(finals, turn_rewards, baseline=baseline, use=use)
    assert advantages == [[0.0]] * 8


@pytest.mark.parametrize(("baseline", "use"), ALL_WAYS)
def test_good_and_bad_calls_of_a_solved_group_have_opposite_signs(
    baseline: RewardBaseline, use: RewardUse
) -> None:
    """All eight solve the task; a call earned 0.1 or -0.1. Compared with the final
    rewards both had -2.65."""
    calls = [0.1, -0.1, 0.1, -0.1, 0.1, 0.1, -0.1, -0.1]
    finals = [1.0] * 8
    turn_rewards = [[call, None] for call in calls]
    advantages = judged(finals, turn_rewards, baseline=baseline, use=use)
    mean = statistics.mean(calls)
    deviation = statistics.stdev(calls)
    for call, (first, last) in zip(calls, advantages, strict=True):
        assert first == pytest.approx((call - mean) / (deviation + 1e-4), rel=1e-6)
        assert last == 0.0, "the answer has the final reward, and those are equal"


def test_a_turn_is_compared_at_its_own_depth_or_with_every_turn() -> None:
    """A reward that every rollout earns more of later: nobody was better than
    anybody."""
    finals = [0.0, 0.0]
    turn_rewards = [[0.0, 1.0], [0.0, 1.0]]
    by_depth = judged(finals, turn_rewards, baseline="depth")
    assert by_depth == [[0.0, 0.0], [0.0, 0.0]]
    by_group = judged(finals, turn_rewards, baseline="group")
    deviation = math.sqrt(1 / 3)  # the sample's, of four rewards
    advantage = 0.5 / (deviation + 1e-4)
    assert by_group == [pytest.approx([-advantage, advantage], rel=1e-6)] * 2


def test_added_reward_of_a_turn_includes_later_turns_and_the_final_reward() -> None:
    """Without a deviation, so that every number can be read off."""
    finals = [0.0, 2.0]
    turn_rewards = [[0.0, 4.0], [1.0, 0.0]]
    added = judged(finals, turn_rewards, use="add", advantage_fn=dr_grpo)
    assert added == [
        [-1 - 0.5 + 2, -1 + 2],
        [1 + 0.5 - 2, 1 - 2],
    ]
    replaced = judged(finals, turn_rewards, use="replace", advantage_fn=dr_grpo)
    assert replaced == [[-0.5, 2.0], [0.5, -2.0]]


def test_only_rewarded_turn_has_zero_advantage() -> None:
    turn_rewards = [[0.7], [None]]
    advantages = judged([0.0, 1.0], turn_rewards, advantage_fn=dr_grpo)
    assert advantages == [[0.0], [0.5]]


def test_all_turn_rules_equal_the_final_reward_without_turn_rewards() -> None:
    expected = [[-0.5, -0.5], [0.5, 0.5]]
    for baseline, use in ALL_WAYS:
        measured = judged(
            [0.0, 1.0],
            [[None, None]] * 2,
            baseline=baseline,
            use=use,
            advantage_fn=dr_grpo,
        )
        assert measured == expected


def family(use: RewardUse) -> list[list[float]]:
    """A group of two. The first rollout has a branch reward and a judged child with a
    child of its own; the second another branch reward, a judged child, and one that was
    not judged."""

    def child(session_id: str) -> list[Turn]:
        only_turn = turn(session_id, None, [1], [2])
        return [replace(only_turn, session_id=session_id)]

    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    first = replace(
        summary("g.0", "g", 0, 0.0),
        branch_rewards={"b": 5.0},
        turn_levels={"b": "main/1"},
        child_rewards={"kid": 3.0, "grandkid": 3.0},
        child_reward_from={"kid": "kid", "grandkid": "kid"},
    )
    c = turn("c", None, [1], [2])
    d = turn("d", "c", [3], [4])
    second = replace(
        summary("g.1", "g", 1, 1.0),
        branch_rewards={"d": 1.0},
        turn_levels={"d": "main/1"},
        child_rewards={"other": 1.0, "heir": 1.0},
        child_reward_from={"other": "other", "heir": "g.1"},
    )
    rollouts = [
        rollout([a, b], child("kid"), child("grandkid"), of=first),
        rollout([c, d], child("other"), child("heir"), of=second),
    ]
    batch = batch_of_group(rollouts)
    train_batch = build_batch(batch, rollouts, dr_grpo, 1e-4, use=use)
    return [row_T[1::2].tolist() for row_T in train_batch.advantages]


def test_trajectories_and_children_are_compared_only_with_each_other() -> None:
    """Finals 0 and 1, branches 5 and 1, judged children 3 and 1 (a child of theirs
    counts with them; one that was not judged has the final reward)."""
    assert family("replace") == [
        [2.0, 2.0],
        [1.0],
        [1.0],
        [-2.0, -2.0],
        [-1.0],
        [0.5],
    ]
    assert family("add") == [
        [1.5, 1.5],
        [0.5],
        [0.5],
        [-1.5, -1.5],
        [-0.5],
        [0.5],
    ]


def test_turns_of_children_are_not_compared_with_the_main_conversation() -> None:
    """Each is the only one of its level."""
    main_turn = turn("a", None, [1], [2])
    child_turn = replace(turn("k", None, [1], [2]), session_id="kid")
    first = replace(
        summary("g.0", "g", 0, 0.0),
        turn_rewards={"a": 1.0},
        turn_levels={"a": "main/0"},
    )
    second = replace(
        summary("g.1", "g", 1, 0.0),
        turn_rewards={"k": 9.0},
        turn_levels={"k": "child/0"},
        child_rewards={"kid": 0.0},
        child_reward_from={"kid": "g.1"},
    )
    rollouts = [
        rollout([main_turn], of=first),
        rollout([child_turn], of=second),
    ]
    batch = batch_of_group(rollouts)
    [group] = batch.groups
    by_level = build_batch(batch, rollouts, dr_grpo, 1e-4)
    assert [row_T.tolist() for row_T in by_level.advantages] == [[0, 0], [0, 0]]
    assert nonzero_variance(group) == "zero_variance"
    by_group = build_batch(batch, rollouts, dr_grpo, 1e-4, baseline="group")
    assert [row_T.tolist() for row_T in by_group.advantages] == [[0, -4], [0, 4]]
    assert nonzero_variance(group, baseline="group") is None
