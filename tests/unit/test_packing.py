"""Packing read back from its own blocks: what each token may see must be its row, no
more and no less. Alphabets of two ids make shared prefixes the rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import LAYOUTS, batch_of, rows, sample, visible

from invrl.train import packing
from invrl.train.micro_batch import Row
from invrl.train.packing import pack
from invrl.train.sharding import shard_batch
from invrl.types import TrainBatch


@pytest.mark.parametrize("share", [True, False])
@given(data=rows(), more=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_last_query_that_sees_a_token_is_its_last_descendant(
    share: bool, data: list[Row], more: int
) -> None:
    for packed in pack(data, max_tokens=1000, share_prefixes=share):
        micro_batch = packed.padded_to(len(packed.tokens_P) + more)
        for place, ancestors in enumerate(visible(micro_batch)):
            is_seen = micro_batch.ends_P[: place + 1] > place
            assert np.flatnonzero(is_seen).tolist() == sorted(ancestors.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [True, False])
@given(
    data=rows(),
    max_tokens=st.sampled_from([1, 5, 12, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_each_wanted_token_is_predicted_from_exactly_its_own_history(
    layout: str, share: bool, data: list[Row], max_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "DENSE_TREE_TOKENS", LAYOUTS[layout])
        micro_batches = pack(data, max_tokens=max_tokens, share_prefixes=share)
    seen: dict[int, np.ndarray] = {}
    for micro_batch in micro_batches:
        attended = visible(micro_batch)
        at = 0
        for index, wanted_N in micro_batch.rows:
            assert index not in seen, "a row is packed once"
            seen[index] = wanted_N
            for t in wanted_N:
                projection = micro_batch.projection_N[at]
                places = attended[micro_batch.project_U[projection]]
                assert (micro_batch.tokens_P[places] == data[index].tokens_T[:t]).all()
                assert (micro_batch.positions_P[places] == np.arange(t)).all()
                assert micro_batch.targets_N[at] == data[index].tokens_T[t]
                assert micro_batch.temperature_U[projection] == data[index].temperature
                at += 1
        assert at == len(micro_batch.targets_N)
    assert {i: list(w) for i, w in seen.items()} == {
        i: list(row.wanted_N) for i, row in enumerate(data) if len(row.wanted_N)
    }


@given(
    data=rows(),
    max_tokens=st.sampled_from([5, 1000]),
    more=st.integers(0, 4),
)
def test_packed_token_counts_the_rows_that_share_it(
    data: list[Row], max_tokens: int, more: int
) -> None:
    for packed in pack(data, max_tokens=max_tokens, share_prefixes=True):
        micro_batch = packed.padded_to(len(packed.tokens_P) + more)
        computed = [
            data[index].tokens_T[: data[index].num_computed].tolist()
            for index, _ in micro_batch.rows
        ]
        for place, places in enumerate(visible(micro_batch)):
            history = micro_batch.tokens_P[places].tolist()
            is_filling = place >= len(packed.tokens_P) or not packed.rows
            expected = (
                0
                if is_filling
                else sum(row[: len(history)] == history for row in computed)
            )
            assert micro_batch.rows_P[place] == expected
    for micro_batch in pack(data, max_tokens=max_tokens, share_prefixes=False):
        assert micro_batch.rows_P.tolist() == [bool(micro_batch.rows)] * len(
            micro_batch.tokens_P
        )


@given(data=rows())
def test_a_shared_prefix_is_computed_once(data: list[Row]) -> None:
    prefixes = {
        tuple(row.tokens_T[:n]) for row in data for n in range(1, row.num_computed + 1)
    }
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    assert len(micro_batch.tokens_P) == max(1, len(prefixes))
    (apart,) = pack(data, max_tokens=1000, share_prefixes=False)
    assert len(apart.tokens_P) == max(1, sum(row.num_computed for row in data))


@given(
    data=rows(),
    max_tokens=st.integers(1, 20),
    share=st.booleans(),
)
def test_micro_batches_are_bounded_and_there_is_at_least_one(
    data: list[Row], max_tokens: int, share: bool
) -> None:
    micro_batches = pack(data, max_tokens=max_tokens, share_prefixes=share)
    assert micro_batches
    for micro_batch in micro_batches:
        alone = len(micro_batch.rows) == 1
        assert len(micro_batch.tokens_P) <= max_tokens or alone


@given(data=rows())
def test_equal_prefixes_are_projected_once(data: list[Row]) -> None:
    """A row of logits is decided by what comes before the token and by the
    temperature."""
    wanted = {
        (tuple(row.tokens_T[:t]), row.temperature) for row in data for t in row.wanted_N
    }
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    assert len(micro_batch.project_U) == len(wanted)
    (apart,) = pack(data, max_tokens=1000, share_prefixes=False)
    assert len(apart.project_U) == sum(len(row.wanted_N) for row in data)


def equal_rows(count: int, prompt: int, answer: int) -> list[Row]:
    tokens_T = np.arange(prompt + answer, dtype=np.int32)
    wanted_N = np.arange(prompt, prompt + answer)
    return [
        Row(tokens_T=tokens_T, wanted_N=wanted_N, temperature=1.0) for _ in range(count)
    ]


def test_equal_rows_share_their_logits() -> None:
    """256 rows that sampled the same 512 tokens: 1,023 packed tokens. A row of logits
    for each trained token would be 131,072 of them."""
    (micro_batch,) = pack(
        equal_rows(256, 512, 512), max_tokens=4096, share_prefixes=True
    )
    assert len(micro_batch.tokens_P) == 1023
    assert len(micro_batch.targets_N) == 256 * 512
    assert len(micro_batch.project_U) == 512


@given(data=rows(), max_tokens=st.integers(1, 20))
def test_placing_picked_values_restores_the_rows(
    data: list[Row], max_tokens: int
) -> None:
    values = [
        np.random.default_rng(0).random(len(row.tokens_T)).astype(np.float32)
        for row in data
    ]
    back = [np.zeros_like(value) for value in values]
    for micro_batch in pack(data, max_tokens=max_tokens, share_prefixes=True):
        micro_batch.place(micro_batch.pick(values), back)
    for row, value, placed in zip(data, values, back, strict=True):
        expected = np.zeros_like(value)
        expected[row.wanted_N] = value[row.wanted_N]
        assert (placed == expected).all()


# ------------------------------------------------------------- mini-batches and ranks


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    samples = []
    for group in range(draw(st.integers(0, 5))):
        for rollout in range(draw(st.integers(1, 4))):
            for _ in range(draw(st.integers(1, 2))):  # branches of one rollout
                length = draw(st.integers(2, 30))
                samples.append(
                    sample(group, rollout, length, draw(st.integers(0, length - 1)))
                )
    return batch_of(samples)


@given(
    batch=batches(),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 4),
)
@settings(deadline=None)
def test_shards_hold_every_trained_row_once_and_mini_batches_do_not_depend_on_ranks(
    batch: TrainBatch, ranks: int, steps: int
) -> None:
    shards = shard_batch(batch, ranks=ranks, steps=steps)
    (alone,) = shard_batch(batch, ranks=1, steps=steps)
    assert len(shards) == ranks
    assert {len(shard) for shard in shards} == {len(alone)}
    assert len(alone) <= steps
    seen: list[int] = []
    for at, whole in enumerate(alone):
        parts = [shard[at] for shard in shards]
        ids = [id(s) for part in parts for s in part.samples]
        assert sorted(ids) == sorted(id(s) for s in whole.samples)
        trained = int(sum(s.loss_mask_T.sum() for s in whole.samples))
        assert trained > 0
        assert {part.trained.tokens for part in parts} == {trained}
        for part in parts:
            for s, advantages_T in zip(part.samples, part.advantages, strict=True):
                assert any(
                    s is x and advantages_T is y
                    for x, y in zip(batch.samples, batch.advantages, strict=True)
                )
        homes = {
            s.rollout_id: rank for rank, part in enumerate(parts) for s in part.samples
        }
        assert all(
            homes[s.rollout_id] == rank
            for rank, part in enumerate(parts)
            for s in part.samples
        ), "the branches of a rollout stay together"
        seen += ids
    assert len(seen) == len(set(seen))
    assert sum(part.trained.tokens for part in alone) == batch.trained.tokens


def test_a_group_is_in_one_mini_batch() -> None:
    batch = batch_of([sample(g, r, 20, 5) for g in range(5) for r in range(3)])
    (alone,) = shard_batch(batch, ranks=1, steps=2)
    groups = [{s.group_id for s in mini.samples} for mini in alone]
    assert [len(g) for g in groups] == [3, 2]
    assert not groups[0] & groups[1]


def test_groups_stay_whole_on_a_rank_where_that_balances() -> None:
    batch = batch_of([sample(g, r, 120, 20) for g in range(4) for r in range(8)])
    shards = shard_batch(batch, ranks=2, steps=1)
    groups = [{s.group_id for s in shard[0].samples} for shard in shards]
    assert [len(g) for g in groups] == [2, 2]
    assert not groups[0] & groups[1]


def test_one_large_group_is_split_over_ranks() -> None:
    batch = batch_of([sample(0, r, 60, 50) for r in range(8)])
    shards = shard_batch(batch, ranks=2, steps=1)
    assert [len(shard[0].samples) for shard in shards] == [4, 4]


def routed_row(tokens: list[int], experts: list[int]) -> Row:
    """The last token is wanted. `experts`: of each token; -1 is unknown."""
    return Row(
        tokens_T=np.array(tokens, np.int32),
        wanted_N=np.array([len(tokens) - 1]),
        temperature=1.0,
        experts_TLK=np.array(experts, np.int16)[:, None, None],
    )


def test_shared_tokens_take_the_experts_of_the_first_row_that_knows_them() -> None:
    rows = [
        routed_row([1, 1, 1, 2], [3, -1, 5, -1]),
        routed_row([1, 1, 2, 2], [4, 6, 7, -1]),
        Row(
            tokens_T=np.array([2, 2], np.int32), wanted_N=np.array([1]), temperature=1.0
        ),
    ]
    [micro_batch] = pack(rows, max_tokens=100, share_prefixes=True)
    assert micro_batch.tokens_P.tolist() == [1, 1, 1, 2, 2]
    assert micro_batch.experts_PLK is not None
    assert micro_batch.experts_PLK.ravel().tolist() == [3, 6, 5, 7, -1]
    assert micro_batch.num_unrecorded == 1
    padded = micro_batch.padded_to(8)
    assert padded.experts_PLK is not None
    assert padded.experts_PLK.ravel().tolist() == [3, 6, 5, 7, -1, -1, -1, -1]


def test_rows_without_experts_make_micro_batches_without_experts() -> None:
    [micro_batch] = pack(equal_rows(3, 5, 4), max_tokens=10_000, share_prefixes=True)
    assert micro_batch.experts_PLK is None
    assert micro_batch.num_unrecorded == len(micro_batch.tokens_P)
