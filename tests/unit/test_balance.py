"""Micro-batches that are full, and ranks that have equally much to do. Shared prefixes
count once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import first_quick
from tiny_model import make_tiny_model

from invrl.families.hf_config import read_hf_config
from invrl.train.batches.bin_packing import balance_bins, pack_into_bins
from invrl.train.batches.micro_batch import TokenSequence, token_sequences
from invrl.train.batches.packing import common_prefix, pack, token_order_key
from invrl.train.batches.sharding import shard_batch
from invrl.train.cost.model_size import UNKNOWN_MODEL, ComputeCost, ModelSize
from invrl.types.batches import TrainBatch, TrainSample
from invrl.types.weights import WeightVersion

SMOLLM2 = ComputeCost(
    token=2 * 106e6, pairs=((None, 4.0 * 576 * 30),), projection=2.0 * 49_152 * 576
)
"""About that of SmolLM2-135M."""


def long_tailed(
    rng: np.random.Generator, count: int, *, median: float = 1100, longest: int = 16_384
) -> list[int]:
    """Half of them are shorter than the median, some are as long as allowed."""
    return (
        np.clip(rng.lognormal(np.log(median), 1.2, count), 8, longest)
        .astype(int)
        .tolist()
    )


# ----------------------------------------------------------------- bins

Tokens = tuple[int, ...]
token_rows = st.lists(st.integers(0, 1), min_size=1, max_size=10).map(tuple)


def shared_lengths(rows: list[Tokens]) -> list[int]:
    arrays = [np.array(row) for row in rows]
    shared = [common_prefix(*neighbours) for neighbours in itertools.pairwise(arrays)]
    return [0, *shared] if rows else []


def distinct_tokens(rows: list[Tokens]) -> int:
    """Nodes of the rows' prefix tree."""
    prefixes: set[Tokens] = set()
    for row in rows:
        prefixes.update(row[:length] for length in range(1, len(row) + 1))
    return len(prefixes)


def check_capacity(bins: list[list[int]], rows: list[Tokens], capacity: int) -> None:
    """A bin is over the capacity only if one row alone is."""
    for places in bins:
        rows_of_bin = [rows[place] for place in places]
        assert distinct_tokens(rows_of_bin) <= capacity or len(places) == 1


@given(
    rows=st.lists(token_rows, max_size=10).map(sorted),
    capacity=st.integers(1, 25),
)
@settings(max_examples=500, deadline=None)
def test_every_sample_is_in_exactly_one_bin_within_its_capacity(
    rows: list[Tokens], capacity: int
) -> None:
    lengths = [len(row) for row in rows]
    bins = pack_into_bins(lengths, shared_lengths(rows), capacity=capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(rows)))
    assert bins == sorted(sorted(places) for places in bins)
    check_capacity(bins, rows, capacity)
    if distinct_tokens(rows) <= capacity:
        assert len(bins) <= 1


@pytest.mark.parametrize("seed", first_quick(range(3)))
def test_ten_thousand_long_tailed_samples_fill_their_bins(seed: int) -> None:
    lengths = long_tailed(np.random.default_rng(seed), 10_000)
    capacity = 16_384
    bins = pack_into_bins(lengths, [0] * len(lengths), capacity=capacity)
    assert max(sum(lengths[place] for place in places) for places in bins) <= capacity
    assert sum(lengths) / (len(bins) * capacity) >= 0.99


def test_group_over_the_capacity_repeats_its_prompt_as_rarely_as_possible() -> None:
    """16 rows of a prompt of 3,000 and an answer of 200: five answers fit beside the
    prompt."""
    bins = pack_into_bins([3200] * 16, [0] + [3000] * 15, capacity=4096)
    assert [len(places) for places in bins] == [5, 5, 5, 1]


def test_rests_of_split_groups_share_a_bin() -> None:
    """Three of a group's four rows fill a bin. Of the three rows left over two fit
    together."""
    bins = pack_into_bins([400] * 12, ([0] + [100] * 3) * 3, capacity=1000)
    assert sorted(len(places) for places in bins) == [1, 2, 3, 3, 3]


def test_chain_of_forks_deeper_than_the_recursion_limit_is_packed() -> None:
    """Each of 5,000 rows goes one token further along the one before it and then leaves
    it."""
    lengths = list(range(2, 5002))
    bins = pack_into_bins(lengths, [0, *range(1, 5000)], capacity=4000)
    assert sorted(itertools.chain(*bins)) == list(range(5000))
    assert len(bins) < 1100


def group_rows(
    rng: np.random.Generator, groups: int, members: int, *, system: int = 0
) -> list[TokenSequence]:
    return token_sequences(
        long_tailed_batch(rng, groups, members, system=system, longest=1500).samples
    )


@pytest.mark.parametrize(
    "system", [0, 500], ids=["no system prompt", "a system prompt"]
)
def test_group_that_fits_into_a_bin_is_computed_once(system: int) -> None:
    """Every prompt is in one micro-batch, the system prompt once in each."""
    rows = group_rows(np.random.default_rng(0), 100, 8, system=system)
    order = sorted(rows, key=lambda row: token_order_key(row.tokens_T))
    distinct = 0
    previous_T = np.empty(0, np.int32)
    for row in order:
        tokens_T = row.tokens_T[: row.num_computed]
        distinct += len(tokens_T) - common_prefix(previous_T, tokens_T)
        previous_T = tokens_T
    micro_batches = pack(rows, max_tokens=16_384, share_prefixes=True)
    computed = sum(len(micro_batch.tokens_P) for micro_batch in micro_batches)
    again = computed - distinct - system * (len(micro_batches) - 1)
    assert 0 <= again < 100  # prompts that happen to begin alike
    assert computed / (len(micro_batches) * 16_384) > 0.9


# ----------------------------------------------------------------- even micro-batches


@given(
    rows=st.lists(token_rows, min_size=2, max_size=10),
    capacity=st.integers(1, 25),
    prefix=st.integers(0, 2),
)
@settings(max_examples=500, deadline=None)
def test_evening_out_bins_keeps_their_samples_and_raises_no_maximum_cost(
    rows: list[Tokens], capacity: int, prefix: int
) -> None:
    rows = sorted((0,) * prefix + row for row in rows)
    lengths = [len(row) for row in rows]
    shared = shared_lengths(rows)

    def work(place: int, start: int) -> float:
        return SMOLLM2.tokens(start, lengths[place])

    def cost(places: list[int]) -> float:
        total = work(places[0], 0)
        for before, place in itertools.pairwise(places):
            shared_with_before = min(shared[before + 1 : place + 1])
            total += work(place, shared_with_before)
        return total

    bins = pack_into_bins(lengths, shared, capacity=capacity)
    even = balance_bins(bins, lengths, shared, capacity=capacity, work=work)
    assert len(even) == len(bins)
    assert sorted(itertools.chain(*even)) == list(range(len(rows)))
    check_capacity(even, rows, capacity)
    largest_before = max(map(cost, bins))
    assert max(map(cost, even)) <= largest_before * (1 + 1e-9)


def micro_batch_costs(rows: list[TokenSequence], max_tokens: int) -> list[float]:
    micro_batches = pack(rows, max_tokens=max_tokens, share_prefixes=True, cost=SMOLLM2)
    costs: list[float] = []
    for micro_batch in micro_batches:
        packed_rows = [rows[index] for index, _ in micro_batch.sequences]
        costs.append(work(packed_rows, SMOLLM2))
    return costs


@pytest.mark.parametrize(
    "system", [0, 500], ids=["no system prompt", "a system prompt"]
)
@pytest.mark.parametrize("seed", first_quick(range(3)))
def test_micro_batches_have_equal_cost(seed: int, system: int) -> None:
    """Of full ones, the last would have the rest: the slowest would take 1.26 times the
    mean."""
    rows = group_rows(np.random.default_rng(seed), 40, 8, system=system)
    costs = micro_batch_costs(rows, 32_768)
    assert len(costs) == 5
    assert max(costs) <= 1.03 * sum(costs) / len(costs)


# ----------------------------------------------------------------- ranks


def long_tailed_batch(
    rng: np.random.Generator,
    groups: int,
    members: int,
    *,
    system: int = 0,
    longest: int = 16_384,
) -> TrainBatch:
    """Groups that share a prompt; answers of all lengths, wholly trained."""
    system_T = rng.integers(0, 1000, system)
    samples: list[TrainSample] = []
    for group in range(groups):
        prompt_T = rng.integers(0, 1000, int(rng.integers(50, 600)))
        for member, answer in enumerate(
            long_tailed(rng, members, median=250, longest=longest)
        ):
            answer_T = rng.integers(0, 1000, answer)
            tokens_T = np.concatenate([system_T, prompt_T, answer_T]).astype(np.int32)
            mask_T = np.arange(len(tokens_T)) >= len(tokens_T) - answer
            sample = TrainSample(
                tokens_T=tokens_T,
                loss_mask_T=mask_T,
                rollout_logprobs_T=np.zeros(len(tokens_T), np.float32),
                versions_T=np.where(mask_T, 0, -1).astype(np.int32),
                reward=0.0,
                temperature=1.0,
                group_id=f"g{group}",
                rollout_id=f"g{group}r{member}",
                attempt=0,
                turn_ids=("t",),
            )
            samples.append(sample)
    return TrainBatch(
        batch_id=0,
        version=WeightVersion(0),
        samples=tuple(samples),
        advantages=tuple(sample.loss_mask_T.astype(np.float32) for sample in samples),
    )


def work(rows: list[TokenSequence], cost: ComputeCost) -> float:
    """Of computing these rows together, as the packing does: token by token of their
    prefix tree."""
    total = 0.0
    previous_T = np.empty(0, np.int32)
    for row in sorted(rows, key=lambda row: token_order_key(row.tokens_T)):
        tokens_T = row.tokens_T[: row.num_computed]
        shared = common_prefix(previous_T, tokens_T)
        depth_T = np.arange(shared, len(tokens_T)) + 1
        total += cost.token * len(depth_T)
        for window, pair in cost.pairs:
            total += pair * float(np.minimum(depth_T, window or len(tokens_T)).sum())
        total += cost.projection * int((row.wanted_N > shared).sum())
        previous_T = tokens_T
    return total


def work_by_rank(batch: TrainBatch, ranks: int, cost: ComputeCost) -> list[float]:
    shards = shard_batch(batch, ranks=ranks, steps=1, cost=cost)
    return [work(token_sequences(shard[0].samples), cost) for shard in shards]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_ten_thousand_long_tailed_samples_are_balanced(ranks: int) -> None:
    batch = long_tailed_batch(np.random.default_rng(0), 1250, 8)
    by_rank = work_by_rank(batch, ranks, SMOLLM2)
    assert max(by_rank) <= 1.02 * sum(by_rank) / ranks
    assert sum(by_rank) == pytest.approx(
        work(token_sequences(batch.samples), SMOLLM2), rel=1e-4
    ), "no group was split"


@pytest.mark.parametrize(
    ("groups", "members", "ranks", "system"),
    [
        (64, 8, 8, 0),
        (64, 8, 16, 0),
        (16, 16, 8, 1000),
        (8, 32, 8, 0),
    ],
)
def test_few_groups_are_split_to_balance_ranks(
    groups: int, members: int, ranks: int, system: int
) -> None:
    batch = long_tailed_batch(
        np.random.default_rng(1), groups, members, system=system, longest=4096
    )
    by_rank = work_by_rank(batch, ranks, SMOLLM2)
    assert max(by_rank) <= 1.02 * sum(by_rank) / ranks
    alone = work(token_sequences(batch.samples), SMOLLM2) + (
        ranks - 1
    ) * SMOLLM2.tokens(0, system)
    assert sum(by_rank) < 1.06 * alone


@pytest.mark.parametrize("seed", [2, 3, 7, 11, 30, 33])
@pytest.mark.parametrize(
    ("groups", "members", "ranks"),
    [
        (8, 16, 8),
        (16, 8, 8),
        (16, 8, 4),
        (8, 8, 4),
        (4, 8, 4),
        (4, 8, 2),
        (32, 8, 8),
    ],
)
def test_rollouts_are_exchanged_until_ranks_have_even_work(
    seed: int, groups: int, members: int, ranks: int
) -> None:
    """The worst of 40 draws. A rollout longer than the mean has a rank for itself."""
    batch = long_tailed_batch(
        np.random.default_rng(seed), groups, members, longest=4096
    )
    by_rank = work_by_rank(batch, ranks, SMOLLM2)
    longest = max(work([row], SMOLLM2) for row in token_sequences(batch.samples))
    assert max(by_rank) <= max(1.02 * sum(by_rank) / ranks, 1.0001 * longest)
    assert sum(by_rank) < 1.08 * work(token_sequences(batch.samples), SMOLLM2)


def test_balancing_also_starts_from_splits_with_more_work() -> None:
    """Exchanges from it alone leave the slowest rank with 1.060 times the work of a
    rank that computes every prompt once; from another split it is 1.038."""
    batch = long_tailed_batch(np.random.default_rng(7), 8, 16, longest=4096)
    by_rank = work_by_rank(batch, 8, SMOLLM2)
    assert max(by_rank) <= 1.045 * work(token_sequences(batch.samples), SMOLLM2) / 8


def test_every_sample_is_on_one_rank_with_its_whole_rollout() -> None:
    """Rollouts of one to three rows."""
    batch = long_tailed_batch(np.random.default_rng(4), 6, 12, longest=4096)
    samples: list[TrainSample] = []
    for index, sample in enumerate(batch.samples):
        number = index % 12 // (1 + index % 3)
        samples.append(replace(sample, rollout_id=f"{sample.group_id}r{number}"))
    batch = replace(batch, samples=tuple(samples))
    shards = shard_batch(batch, ranks=4, steps=1, cost=SMOLLM2)
    placed: list[int] = []
    ranks_by_rollout: dict[str, set[int]] = {}
    for rank, [mini_batch] in enumerate(shards):
        for sample in mini_batch.samples:
            placed.append(id(sample))
            ranks_by_rollout.setdefault(sample.rollout_id, set()).add(rank)
    assert sorted(placed) == sorted(id(sample) for sample in samples)
    assert {len(ranks) for ranks in ranks_by_rollout.values()} == {1}


def test_cost_of_a_long_sample_includes_attention() -> None:
    """One row of 32,000 tokens costs as much as many of 1,000: without attention it
    would be 32 of them."""
    template = long_tailed_batch(np.random.default_rng(2), 1, 1, longest=1)
    [template_sample] = template.samples
    samples: list[TrainSample] = []
    for index, length in enumerate([32_000] + [1000] * 400):
        mask_T = np.arange(length) > 0
        sample = replace(
            template_sample,
            tokens_T=np.full(length, index, np.int32),
            loss_mask_T=mask_T,
            rollout_logprobs_T=np.zeros(length, np.float32),
            versions_T=np.where(mask_T, 0, -1).astype(np.int32),
            group_id=f"g{index}",
            rollout_id=f"r{index}",
        )
        samples.append(sample)
    batch = replace(
        template,
        samples=tuple(samples),
        advantages=tuple(sample.loss_mask_T.astype(np.float32) for sample in samples),
    )
    shards = shard_batch(batch, ranks=2, steps=1, cost=SMOLLM2)
    [with_long] = [
        mini_batch
        for [mini_batch] in shards
        if any(len(sample.tokens_T) == 32_000 for sample in mini_batch.samples)
    ]
    others = len(with_long.samples) - 1
    long_in_short_rows = SMOLLM2.tokens(0, 31_999) / SMOLLM2.tokens(0, 999)
    assert others == pytest.approx((400 - long_in_short_rows) / 2, abs=20)
    assert others < 200 - 32


# ---------------------------------------------------------------- the cost of a model


@pytest.mark.parametrize("window", [None, 1, 3, 7])
def test_the_cost_of_tokens_is_a_sum_over_queries_and_keys(window: int | None) -> None:
    cost = ComputeCost(token=2.0, pairs=((window, 0.5), (None, 0.25)), projection=0.0)
    for start, end in itertools.combinations_with_replacement(range(12), 2):
        expected = 0.0
        for query in range(start, end):
            expected += 2.0 + 0.5 * min(query + 1, window or 99) + 0.25 * (query + 1)
        assert cost.tokens(start, end) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_model_size_counts_the_parameters_in_its_files(
    tmp_path: Path, tied: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", tie_embeddings=tied, layers=2)
    config = read_hf_config(folder)
    size = ModelSize.of(folder, config)
    vocabulary = config.vocab_size * config.hidden_size
    assert size.vocabulary == vocabulary
    assert size.total == size.layers + vocabulary * (1 if tied else 2)
    cost = ComputeCost.of_model(folder)
    assert cost.token == 2 * size.layers
    assert cost.projection == 2 * vocabulary
    assert cost.pairs == (
        (None, 4.0 * config.num_attention_heads * config.head_dim * 2),
    )


def test_default_cost_doubles_for_a_token_at_position_4096() -> None:
    at_4096 = UNKNOWN_MODEL.tokens(4095, 4096)
    assert at_4096 == pytest.approx(2.0)
