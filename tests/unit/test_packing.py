"""Packing read back from its own blocks: what each token may see must be its row, no
more and no less. Alphabets of two ids make shared prefixes the rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import LAYOUTS, batch_of, rows, sample, visible

from invrl.train.batches import packing
from invrl.train.batches.micro_batch import MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.batches.sharding import shard_batch
from invrl.types.batches import TrainBatch


@pytest.mark.parametrize("share", [True, False])
@given(data=rows(), more=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_last_query_that_sees_a_token_is_its_last_descendant(
    share: bool, data: list[TokenSequence], more: int
) -> None:
    for packed in pack(data, max_tokens=1000, share_prefixes=share):
        micro_batch = packed.padded_to(len(packed.tokens_P) + more)
        for place, ancestors in enumerate(visible(micro_batch)):
            is_seen = micro_batch.ends_P[: place + 1] > place
            assert np.flatnonzero(is_seen).tolist() == sorted(ancestors.tolist())


def check_history(
    micro_batch: MicroBatch,
    attended: list[np.ndarray],
    row: TokenSequence,
    t: int,
    target: int,
) -> None:
    """Token t of the row is predicted from the t tokens before it and from no other."""
    projection = micro_batch.projection_N[target]
    places = attended[micro_batch.project_U[projection]]
    assert (micro_batch.tokens_P[places] == row.tokens_T[:t]).all()
    assert (micro_batch.positions_P[places] == np.arange(t)).all()
    assert micro_batch.targets_N[target] == row.tokens_T[t]
    assert micro_batch.temperature_U[projection] == row.temperature


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [True, False])
@given(data=rows(), max_tokens=st.sampled_from([1, 5, 12, 1000]))
@settings(max_examples=60, deadline=None)
def test_each_wanted_token_is_predicted_from_exactly_its_own_history(
    layout: str, share: bool, data: list[TokenSequence], max_tokens: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "DENSE_TREE_TOKENS", LAYOUTS[layout])
        micro_batches = pack(data, max_tokens=max_tokens, share_prefixes=share)
    wanted_by_row: dict[int, list[int]] = {}
    for micro_batch in micro_batches:
        attended = visible(micro_batch)
        num_targets = 0
        for index, wanted_N in micro_batch.sequences:
            assert index not in wanted_by_row, "a row is packed once"
            wanted_by_row[index] = list(wanted_N)
            for t in wanted_N:
                check_history(micro_batch, attended, data[index], t, num_targets)
                num_targets += 1
        assert num_targets == len(micro_batch.targets_N)
    assert wanted_by_row == {
        index: list(row.wanted_N) for index, row in enumerate(data) if len(row.wanted_N)
    }


@given(
    data=rows(),
    max_tokens=st.sampled_from([5, 1000]),
    more=st.integers(0, 4),
)
def test_packed_token_counts_the_samples_that_share_it(
    data: list[TokenSequence], max_tokens: int, more: int
) -> None:
    for packed in pack(data, max_tokens=max_tokens, share_prefixes=True):
        micro_batch = packed.padded_to(len(packed.tokens_P) + more)
        num_tokens = len(packed.tokens_P) if packed.sequences else 0
        computed: list[list[int]] = []
        for index, _ in micro_batch.sequences:
            row = data[index]
            computed.append(row.tokens_T[: row.num_computed].tolist())
        for place, places in enumerate(visible(micro_batch)):
            history = micro_batch.tokens_P[places].tolist()
            sharing = [row for row in computed if row[: len(history)] == history]
            is_padding = place >= num_tokens
            expected = 0 if is_padding else len(sharing)
            assert micro_batch.sequences_P[place] == expected
    for micro_batch in pack(data, max_tokens=max_tokens, share_prefixes=False):
        has_rows = bool(micro_batch.sequences)
        assert micro_batch.sequences_P.tolist() == [has_rows] * len(
            micro_batch.tokens_P
        )


@given(data=rows())
def test_a_shared_prefix_is_computed_once(data: list[TokenSequence]) -> None:
    prefixes: set[tuple[int, ...]] = set()
    for row in data:
        for length in range(1, row.num_computed + 1):
            prefixes.add(tuple(row.tokens_T[:length]))
    [shared] = pack(data, max_tokens=1000, share_prefixes=True)
    assert len(shared.tokens_P) == max(1, len(prefixes))
    [apart] = pack(data, max_tokens=1000, share_prefixes=False)
    num_computed = sum(row.num_computed for row in data)
    assert len(apart.tokens_P) == max(1, num_computed)


@given(
    data=rows(),
    max_tokens=st.integers(1, 20),
    share=st.booleans(),
)
def test_micro_batches_are_bounded_and_there_is_at_least_one(
    data: list[TokenSequence], max_tokens: int, share: bool
) -> None:
    micro_batches = pack(data, max_tokens=max_tokens, share_prefixes=share)
    assert micro_batches
    for micro_batch in micro_batches:
        alone = len(micro_batch.sequences) == 1
        assert len(micro_batch.tokens_P) <= max_tokens or alone


@given(data=rows())
def test_equal_prefixes_are_projected_once(data: list[TokenSequence]) -> None:
    """A row of logits is decided by what comes before the token and by the
    temperature."""
    projected: set[tuple[tuple[int, ...], float]] = set()
    for row in data:
        for t in row.wanted_N:
            prefix = tuple(row.tokens_T[:t])
            projected.add((prefix, row.temperature))
    [shared] = pack(data, max_tokens=1000, share_prefixes=True)
    assert len(shared.project_U) == len(projected)
    [apart] = pack(data, max_tokens=1000, share_prefixes=False)
    assert len(apart.project_U) == sum(len(row.wanted_N) for row in data)


def equal_rows(count: int, prompt: int, answer: int) -> list[TokenSequence]:
    tokens_T = np.arange(prompt + answer, dtype=np.int32)
    wanted_N = np.arange(prompt, prompt + answer)
    row = TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N, temperature=1.0)
    return [replace(row) for _ in range(count)]


def test_equal_samples_share_their_logits() -> None:
    """256 rows that sampled the same 512 tokens: 1,023 packed tokens. A row of logits
    for each trained token would be 131,072 of them."""
    rows = equal_rows(256, prompt=512, answer=512)
    [micro_batch] = pack(rows, max_tokens=4096, share_prefixes=True)
    assert len(micro_batch.tokens_P) == 1023
    assert len(micro_batch.targets_N) == 256 * 512
    assert len(micro_batch.project_U) == 512


@given(data=rows(), max_tokens=st.integers(1, 20))
def test_placing_picked_values_restores_the_samples(
    data: list[TokenSequence], max_tokens: int
) -> None:
    values: list[np.ndarray] = []
    for row in data:
        generator = np.random.default_rng(0)
        values.append(generator.random(len(row.tokens_T)).astype(np.float32))
    placed = [np.zeros_like(values_T) for values_T in values]
    for micro_batch in pack(data, max_tokens=max_tokens, share_prefixes=True):
        picked_N = micro_batch.pick(values)
        micro_batch.place(picked_N, placed)
    for row, values_T, placed_T in zip(data, values, placed, strict=True):
        expected_T = np.zeros_like(values_T)
        expected_T[row.wanted_N] = values_T[row.wanted_N]
        assert (placed_T == expected_T).all()


# ------------------------------------------------------------- mini-batches and ranks


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    samples = []
    for group in range(draw(st.integers(0, 5))):
        for rollout in range(draw(st.integers(1, 4))):
            for _ in range(draw(st.integers(1, 2))):  # branches of one rollout
                length = draw(st.integers(2, 30))
                prompt = draw(st.integers(0, length - 1))
                samples.append(sample(group, rollout, length, prompt))
    return batch_of(samples)


def sample_ids(mini_batches: Iterable[TrainBatch]) -> list[int]:
    return [id(sample) for batch in mini_batches for sample in batch.samples]


@given(
    batch=batches(),
    ranks=st.integers(1, 4),
    steps=st.integers(1, 4),
)
@settings(deadline=None)
def test_shards_hold_every_trained_sample_once_and_mini_batches_do_not_depend_on_ranks(
    batch: TrainBatch, ranks: int, steps: int
) -> None:
    shards = shard_batch(batch, ranks=ranks, steps=steps)
    [alone] = shard_batch(batch, ranks=1, steps=steps)
    assert len(shards) == ranks
    assert {len(shard) for shard in shards} == {len(alone)}
    assert len(alone) <= steps
    advantages_by_sample = {
        id(sample): advantages_T
        for sample, advantages_T in zip(batch.samples, batch.advantages, strict=True)
    }
    for step, whole in enumerate(alone):
        parts = [shard[step] for shard in shards]
        assert sorted(sample_ids(parts)) == sorted(sample_ids([whole]))
        trained = int(sum(sample.loss_mask_T.sum() for sample in whole.samples))
        assert trained > 0
        assert {part.trained.tokens for part in parts} == {trained}
        ranks_by_rollout: dict[str, set[int]] = {}
        for rank, part in enumerate(parts):
            for shard_sample, advantages_T in zip(
                part.samples, part.advantages, strict=True
            ):
                assert advantages_by_sample[id(shard_sample)] is advantages_T
                ranks_by_rollout.setdefault(shard_sample.rollout_id, set()).add(rank)
        for ranks_of_rollout in ranks_by_rollout.values():
            assert len(ranks_of_rollout) == 1, "the branches of a rollout stay together"
    sharded_ids = sample_ids(part for shard in shards for part in shard)
    assert len(sharded_ids) == len(set(sharded_ids))
    assert sum(part.trained.tokens for part in alone) == batch.trained.tokens


def group_ids(batch: TrainBatch) -> set[str]:
    return {sample.group_id for sample in batch.samples}


def test_a_group_is_in_one_mini_batch() -> None:
    samples = [
        sample(group, rollout, 20, 5) for group in range(5) for rollout in range(3)
    ]
    [alone] = shard_batch(batch_of(samples), ranks=1, steps=2)
    first, second = map(group_ids, alone)
    assert len(first) == 3
    assert len(second) == 2
    assert not first & second


def test_groups_stay_whole_on_a_rank_where_that_balances() -> None:
    samples = [
        sample(group, rollout, 120, 20) for group in range(4) for rollout in range(8)
    ]
    shards = shard_batch(batch_of(samples), ranks=2, steps=1)
    first, second = [group_ids(mini_batch) for [mini_batch] in shards]
    assert len(first) == 2
    assert len(second) == 2
    assert not first & second


def test_one_large_group_is_split_over_ranks() -> None:
    batch = batch_of([sample(0, rollout, 60, 50) for rollout in range(8)])
    shards = shard_batch(batch, ranks=2, steps=1)
    assert [len(mini_batch.samples) for [mini_batch] in shards] == [4, 4]


def routed_row(tokens: list[int], experts: list[int]) -> TokenSequence:
    """The last token is wanted. `experts`: of each token; -1 is unknown."""
    experts_T = np.array(experts, np.int16)
    last = len(tokens) - 1
    return TokenSequence(
        tokens_T=np.array(tokens, np.int32),
        wanted_N=np.array([last]),
        temperature=1.0,
        experts_TLK=experts_T[:, None, None],
    )


def test_shared_tokens_take_the_experts_of_the_first_sample_that_knows_them() -> None:
    unrecorded_row = TokenSequence(
        tokens_T=np.array([2, 2], np.int32),
        wanted_N=np.array([1]),
        temperature=1.0,
    )
    rows = [
        routed_row([1, 1, 1, 2], [3, -1, 5, -1]),
        routed_row([1, 1, 2, 2], [4, 6, 7, -1]),
        unrecorded_row,
    ]
    [micro_batch] = pack(rows, max_tokens=100, share_prefixes=True)
    assert micro_batch.tokens_P.tolist() == [1, 1, 1, 2, 2]
    assert micro_batch.experts_PLK is not None
    assert micro_batch.experts_PLK.ravel().tolist() == [3, 6, 5, 7, -1]
    assert micro_batch.num_unrecorded == 1
    padded = micro_batch.padded_to(8)
    assert padded.experts_PLK is not None
    padded_experts = padded.experts_PLK.ravel().tolist()
    assert padded_experts == [3, 6, 5, 7, -1, -1, -1, -1]


def test_samples_without_experts_make_micro_batches_without_experts() -> None:
    [micro_batch] = pack(equal_rows(3, 5, 4), max_tokens=10_000, share_prefixes=True)
    assert micro_batch.experts_PLK is None
    assert micro_batch.num_unrecorded == len(micro_batch.tokens_P)
