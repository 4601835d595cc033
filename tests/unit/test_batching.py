"""From turns to rows: which token is trained where, with which log-prob, version and advantage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.algorithms.advantages import dr_grpo, grpo
from invrl.buffer.batching import build_batch, samples_from_rollout
from invrl.buffer.policies import nonzero_variance
from invrl.errors import BufferStateError, PluginError
from invrl.types import (
    FinishReason,
    Group,
    Rollout,
    RolloutSummary,
    TakenBatch,
    Trajectory,
    Turn,
    VersionSpan,
    WeightVersion,
)


def turn(
    id: str,
    parent: str | None,
    context: Sequence[int],
    sampled: Sequence[int],
    *,
    version: int = 0,
    finish: FinishReason = "stop",
    delivered: bool = True,
    temperature: float = 1.0,
) -> Turn:
    """The log-prob of token n is -n/100, so that a row can be checked by its ids."""
    return Turn(
        id=id,
        session_id="s",
        parent_id=parent,
        context_ids_T=np.array(context, np.int32),
        sampled_ids_T=np.array(sampled, np.int32),
        logprobs_T=np.array(sampled, np.float32) / -100,
        spans=(VersionSpan(version=WeightVersion(version), start=0, end=len(sampled)),),
        finish_reason=finish,
        request_digest="",
        delivered=delivered,
        temperature=temperature,
        prompt_tokens=len(context),
        cached_tokens=0,
        fork_reason="",
        started_at=0.0,
        finished_at=1.0,
    )


def summary(
    session_id: str = "s", group_id: str = "g", index: int = 0, reward: float = 1.0
) -> RolloutSummary:
    return RolloutSummary(
        session_id=session_id,
        task_id="t",
        group_id=group_id,
        index=index,
        attempt=2,
        reward=reward,
        num_turns=1,
        prompt_tokens=1,
        cached_tokens=0,
        later_prompt_tokens=0,
        later_cached_tokens=0,
        sampled_tokens=1,
        trained_tokens=1,
        truncated=False,
        oldest_version=WeightVersion(0),
        newest_version=WeightVersion(0),
        forks=0,
        started_at=0.0,
        finished_at=1.0,
    )


def rollout(*paths: Sequence[Turn], of: RolloutSummary | None = None) -> Rollout:
    return Rollout(
        summary=of or summary(), trajectories=tuple(Trajectory(turns=tuple(path)) for path in paths)
    )


def test_one_branch_is_one_row() -> None:
    a = turn("a", None, [1, 2], [3, 4], version=0)
    b = turn("b", "a", [5], [6], version=1)
    (row,) = samples_from_rollout(rollout([a, b]))
    assert row.tokens_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.loss_mask_T.tolist() == [False, False, True, True, False, True]
    assert row.rollout_logprobs_T.tolist() == pytest.approx([0, 0, -0.03, -0.04, 0, -0.06])
    assert row.versions_T.tolist() == [-1, -1, 0, 0, -1, 1]
    assert (row.turn_ids, row.group_id, row.rollout_id, row.attempt) == (("a", "b"), "g", "s", 2)
    assert [array.dtype for array in (row.tokens_T, row.rollout_logprobs_T, row.versions_T)] == [
        np.int32,
        np.float32,
        np.int32,
    ]


def test_a_shared_turn_is_trained_in_the_first_branch_only() -> None:
    a = turn("a", None, [1], [2])
    b = turn("b", "a", [3], [4])
    c = turn("c", "a", [5], [6])
    first, second = samples_from_rollout(rollout([a, b], [a, c]))
    assert first.tokens_T[first.loss_mask_T].tolist() == [2, 4]
    assert second.tokens_T.tolist() == [1, 2, 5, 6]
    assert second.tokens_T[second.loss_mask_T].tolist() == [6]
    assert second.rollout_logprobs_T.tolist() == pytest.approx([0, 0, 0, -0.06])
    assert second.versions_T.tolist() == [-1, -1, -1, 0]


def test_an_undelivered_or_aborted_leaf_is_cut_off() -> None:
    a = turn("a", None, [1], [2])
    lost = turn("b", "a", [3], [4], delivered=False)
    aborted = turn("c", "a", [5], [6], finish="abort")
    (row,) = samples_from_rollout(rollout([a, lost], [a, aborted]))
    assert row.tokens_T.tolist() == [1, 2]


def test_what_an_undelivered_leaf_leaves_is_not_a_row_beside_a_longer_branch() -> None:
    a = turn("a", None, [1], [2])
    lost = turn("b", "a", [3], [4], delivered=False)
    c = turn("c", "a", [5], [6])
    (row,) = samples_from_rollout(rollout([a, lost], [a, c]))
    assert row.turn_ids == ("a", "c")
    assert row.tokens_T[row.loss_mask_T].tolist() == [2, 6]


def test_an_undelivered_inner_turn_is_context() -> None:
    a = turn("a", None, [1], [2], delivered=False)
    b = turn("b", "a", [3], [4])
    (row,) = samples_from_rollout(rollout([a, b]))
    assert row.tokens_T.tolist() == [1, 2, 3, 4]
    assert row.loss_mask_T.tolist() == [False, False, False, True]


def test_the_first_token_is_never_trained() -> None:
    (row,) = samples_from_rollout(rollout([turn("a", None, [], [7, 8])]))
    assert row.loss_mask_T.tolist() == [False, True]
    assert row.versions_T.tolist() == [-1, 0]
    assert samples_from_rollout(rollout([turn("a", None, [], [7])])) == []


def test_a_rollout_without_trained_tokens_has_no_row() -> None:
    assert samples_from_rollout(rollout([turn("a", None, [1], [2], delivered=False)])) == []
    assert samples_from_rollout(rollout([turn("a", None, [1], [])])) == []
    assert samples_from_rollout(rollout()) == []


def test_several_temperatures_in_a_row_are_refused() -> None:
    a = turn("a", None, [1], [2], temperature=1.0)
    b = turn("b", "a", [3], [4], temperature=0.5)
    with pytest.raises(BufferStateError, match="several temperatures"):
        samples_from_rollout(rollout([a, b]))


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Random forests of up to 8 turns; every sampled id is unique, so tokens can be counted."""
    ids = itertools.count(1)
    turns: list[Turn] = []
    for n in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *(t.id for t in turns)]))
        turns.append(
            turn(
                f"t{n}",
                parent,
                [next(ids) for _ in range(draw(st.integers(1, 3)))],
                [next(ids) for _ in range(draw(st.integers(0, 3)))],
                delivered=draw(st.booleans()),
                finish=draw(st.sampled_from(["stop", "length", "abort"])),
                version=draw(st.integers(0, 3)),
            )
        )
    return turns


def branches(turns: list[Turn]) -> list[list[Turn]]:
    by_id = {t.id: t for t in turns}
    paths = []
    for leaf in turns:
        if any(t.parent_id == leaf.id for t in turns):
            continue
        path = [leaf]
        while (parent := path[0].parent_id) is not None:
            path.insert(0, by_id[parent])
        paths.append(path)
    return paths


@settings(max_examples=200, deadline=None)
@given(turns=forests())
def test_every_trainable_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    rows = samples_from_rollout(rollout(*branches(turns)))
    trained = Counter(int(token) for row in rows for token in row.tokens_T[row.loss_mask_T])
    expected = Counter(
        int(token) for t in turns if t.delivered and t.finish_reason != "abort" for token in t.sampled_ids_T
    )
    assert trained == expected
    by_id = {t.id: t for t in turns}
    for row in rows:
        assert row.loss_mask_T.any()
        path = [by_id[id] for id in row.turn_ids]
        assert row.tokens_T.tolist() == [int(n) for t in path for n in [*t.context_ids_T, *t.sampled_ids_T]]
        mask = row.loss_mask_T
        assert row.rollout_logprobs_T[mask].tolist() == pytest.approx((row.tokens_T[mask] / -100).tolist())
        version_of = {int(n): v for t in path for n, v in zip(t.sampled_ids_T, t.versions_T, strict=True)}
        assert [version_of[int(n)] for n in row.tokens_T[mask]] == row.versions_T[mask].tolist()
        assert (row.versions_T[~mask] == -1).all()
        assert (row.rollout_logprobs_T[~mask] == 0).all()


# ------------------------------------------------------------------ batches


def taken(*groups: tuple[str, list[float]]) -> TakenBatch:
    return TakenBatch(
        batch_id=4,
        version=WeightVersion(7),
        groups=tuple(
            Group(
                id=name,
                task_id="t",
                rollouts_G=tuple(
                    summary(f"{name}.{index}", name, index, reward) for index, reward in enumerate(rewards)
                ),
            )
            for name, rewards in groups
        ),
    )


def test_a_rollout_of_two_rows_counts_once_in_the_baseline() -> None:
    """Rewards 0, 0, 3: the mean is 1, though the rollout with 3 has two rows of three tokens in all."""
    batch = taken(("g", [0.0, 0.0, 3.0]))
    a, b, c = turn("a", None, [1], [2, 3]), turn("b", "a", [4], [5]), turn("c", "a", [6], [7])
    members = batch.groups[0].rollouts_G
    rollouts = [
        rollout([a], of=members[0]),
        rollout([turn("x", None, [1], [9], delivered=False)], of=members[1]),
        rollout([a, b], [a, c], of=members[2]),
    ]
    made = build_batch(batch, reversed(rollouts), dr_grpo, 1e-4)
    assert [sample.rollout_id for sample in made.samples] == ["g.0", "g.2", "g.2"]
    assert [row_T.tolist() for row_T in made.advantages] == [[0, -1, -1], [0, 2, 2, 0, 2], [0, 0, 0, 0, 2]]
    assert (made.batch_id, made.version) == (4, 7)
    assert made.total_tokens == 6
    assert all(row_T.dtype == np.float32 for row_T in made.advantages)


def advantage_of(reward: float, others: Sequence[float]) -> float:
    """Of a rollout with this reward in a group with `others`: its distance to the mean, in deviations."""
    rewards = [reward, *others]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return (reward - mean) / deviation if deviation else 0.0


def test_own_rewards_of_turn_branch_and_child_stand_in_the_final_ones_place() -> None:
    """The member with 3 has two branches and a child; the others are compared by their final rewards."""
    batch = taken(("g", [0.0, 1.0, 3.0]))
    first, second, third = batch.groups[0].rollouts_G
    a, b, c = turn("a", None, [1], [2, 3]), turn("b", "a", [4], [5]), turn("c", "a", [6], [7])
    tail = turn("tail", "c", [8], [9], delivered=False)
    child, sub = replace(turn("d", None, [1], [2]), session_id="kid"), turn("e", None, [1], [2, 3])
    own = {
        "turn_rewards": {"a": -1.0},
        "branch_rewards": {"c": 2.0},
        "child_rewards": {"kid": 7.0, "kid2": 3.0},
    }
    third = replace(third, **own)
    batch = replace(batch, groups=(replace(batch.groups[0], rollouts_G=(first, second, third)),))
    rollouts = [
        rollout([turn("x", None, [1], [9])], of=first),
        rollout([turn("y", None, [1], [9])], of=second),
        rollout([a, b], [a, c, tail], [child], [replace(sub, session_id="kid2")], of=third),
    ]
    made = build_batch(batch, rollouts, grpo, 0.0)
    assert [sample.reward for sample in made.samples] == [0.0, 1.0, 3.0, 2.0, 7.0, 3.0]
    final = advantage_of(3.0, [0.0, 1.0])
    turned, branched, kid = (advantage_of(reward, [0.0, 1.0]) for reward in (-1.0, 2.0, 7.0))
    expected = [[0, turned, turned, 0, final], [0, 0, 0, 0, branched], [0, kid], [0, final, final]]
    for row_T, wanted in zip(made.advantages[2:], expected, strict=True):
        assert row_T.tolist() == pytest.approx(wanted, rel=1e-6)
    others = [float(row_T[1]) for row_T in made.advantages[:2]]
    assert others == pytest.approx([advantage_of(0.0, [1.0, 3.0]), advantage_of(1.0, [0.0, 3.0])], rel=1e-6)
    assert len(made.samples) == 6


def test_of_two_rewards_on_a_branch_the_later_turns_counts_and_a_turns_own_comes_first() -> None:
    a, b, c = turn("a", None, [1], [2]), turn("b", "a", [3], [4]), turn("c", "a", [5], [6])
    own = replace(summary(reward=1.0), branch_rewards={"a": 0.5, "c": 0.25})
    rows = samples_from_rollout(rollout([a, b], [a, c], of=own))
    assert [row.reward for row in rows] == [0.5, 0.25]


def test_untrained_roots_make_no_rows() -> None:
    a, b, c = turn("a", None, [1], [2]), turn("b", "a", [3], [4]), turn("c", None, [5], [6])
    of = replace(summary(), untrained_roots=("a",))
    (row,) = samples_from_rollout(rollout([a, b], [c], of=of))
    assert row.turn_ids == ("c",)


def test_a_group_of_equal_final_rewards_counts_if_a_branch_differs() -> None:
    (group,) = taken(("g", [1.0, 1.0])).groups
    assert nonzero_variance(group) == "zero_variance"
    first, second = group.rollouts_G
    for own in ({"turn_rewards": {"a": 0.0}}, {"branch_rewards": {"a": 0.0}}, {"child_rewards": {"s": 0.0}}):
        assert nonzero_variance(replace(group, rollouts_G=(first, replace(second, **own)))) is None


def test_groups_have_their_own_baselines() -> None:
    batch = taken(("g", [0.0, 1.0]), ("h", [5.0, 5.0, 8.0]))
    rollouts = [
        rollout([turn("a", None, [1], [2])], of=member)
        for group in batch.groups
        for member in group.rollouts_G
    ]
    made = build_batch(batch, rollouts, grpo, 1e-9)
    expected = [-(0.5**0.5), 0.5**0.5, -1 / 3**0.5, -1 / 3**0.5, 2 / 3**0.5]
    assert [float(row_T[1]) for row_T in made.advantages] == pytest.approx(expected, rel=1e-6)


def test_missing_tokens_are_a_broken_invariant() -> None:
    with pytest.raises(BufferStateError, match=r"no tokens for session g\.0"):
        build_batch(taken(("g", [1.0])), [], grpo, 1e-4)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.array([np.nan, 0.0]), np.float64(0.0)])
def test_what_a_users_advantage_returns_is_checked(wrong: np.ndarray) -> None:
    batch = taken(("g", [0.0, 1.0]))
    with pytest.raises(PluginError, match="one finite advantage per rollout"):
        build_batch(batch, [], lambda rewards_G, *, eps: wrong, 1e-4)
