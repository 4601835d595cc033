"""Context parallelism read back from the shares of all ranks: together they compute
what one rank would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import LAYOUTS, rows, shares_of, sights, visible

from invrl.train.batches import packing
from invrl.train.batches.micro_batch import EMPTY_MICRO_BATCH, MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.layers.sliding_window import windowed


def packed(data: list[TokenSequence]) -> MicroBatch:
    [micro_batch] = pack(data, max_tokens=10_000, share_prefixes=True)
    return micro_batch


@pytest.mark.parametrize("layout", LAYOUTS)
@given(
    data=rows(),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_queries_of_context_ranks_see_the_keys_of_one_rank(
    layout: str,
    data: list[TokenSequence],
    ranks: int,
    multiple: int,
    window: int | None,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "DENSE_TREE_TOKENS", LAYOUTS[layout])
        micro_batch = packed(data)
    shares = shares_of(micro_batch, ranks, multiple)
    padded = shares[0].micro_batch
    blocks = list(padded.blocks)
    if window is not None:
        blocks = windowed(blocks, padded.positions_P, window)
    sights_of_one_rank = sights(blocks)
    for share in shares:
        own_blocks = list(share.own_blocks(blocks))
        queries: list[int] = []
        for block in own_blocks:
            queries += range(block.start, block.end)
        assert queries == share.places_Q.tolist()
        expected = [sights_of_one_rank[place] for place in queries]
        assert sights(own_blocks) == expected


@given(
    data=rows(),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 3),
)
def test_every_token_has_one_rank_and_all_ranks_have_equally_many(
    data: list[TokenSequence],
    ranks: int,
    multiple: int,
) -> None:
    shares = shares_of(packed(data), ranks, multiple)
    padded = shares[0].micro_batch
    num_tokens = len(padded.tokens_P)
    assert num_tokens % (ranks * multiple) == 0
    for share in shares:
        assert len(share.places_Q) * ranks == num_tokens
        own_tokens_Q = padded.tokens_P[share.places_Q]
        assert (share.tokens_Q == own_tokens_Q).all()
    places = np.concatenate([share.places_Q for share in shares])
    assert sorted(places.tolist()) == list(range(num_tokens))


@given(
    data=rows(),
    ranks=st.integers(2, 4),
    multiple=st.integers(1, 3),
)
def test_gathered_tokens_are_in_the_order_of_the_ranks(
    data: list[TokenSequence],
    ranks: int,
    multiple: int,
) -> None:
    shares = shares_of(packed(data), ranks, multiple)
    places = np.concatenate([share.places_Q for share in shares])
    gathered_P = shares[0].gathered_P
    assert gathered_P is not None
    assert gathered_P[places].tolist() == list(range(len(places)))


@given(
    data=rows(),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 5),
)
def test_padding_is_a_separate_tree(
    data: list[TokenSequence],
    ranks: int,
    multiple: int,
) -> None:
    micro_batch = packed(data)
    num_tokens = len(micro_batch.tokens_P)
    shares = shares_of(micro_batch, ranks, multiple)
    padded = shares[0].micro_batch
    attended = visible(padded)
    attended_by_tokens = attended[:num_tokens]
    attended_by_padding = attended[num_tokens:]
    for expected, places in zip(
        visible(micro_batch),
        attended_by_tokens,
        strict=True,
    ):
        assert (places == expected).all()
    for places in attended_by_padding:
        assert places.min() >= num_tokens
    assert padded.sequences is micro_batch.sequences
    assert padded.project_U is micro_batch.project_U


@given(data=rows(), ranks=st.integers(1, 4))
def test_every_wanted_token_is_predicted_on_one_rank(
    data: list[TokenSequence],
    ranks: int,
) -> None:
    """From the token before it, at its own temperature."""
    micro_batch = packed(data)
    targets_N = micro_batch.targets_N
    places_N = micro_batch.project_U[micro_batch.projection_N]
    temperatures_N = micro_batch.temperature_U[micro_batch.projection_N]
    num_ranks_N = np.zeros(len(targets_N), np.int64)
    for share in shares_of(micro_batch, ranks):
        own, is_own_N = share.own_projections()
        num_ranks_N += is_own_N
        own_places_N = own.project_U[own.projection_N]
        own_temperatures_N = own.temperature_U[own.projection_N]
        assert (own.targets_N == targets_N[is_own_N]).all()
        assert (own_places_N == places_N[is_own_N]).all()
        assert (own_temperatures_N == temperatures_N[is_own_N]).all()
        indices_U = share.own_indices(own.project_U)
        assert (share.places_Q[indices_U] == own.project_U).all()
        num_wanted = sum(len(wanted_N) for _, wanted_N in own.sequences)
        assert num_wanted == is_own_N.sum()
    assert (num_ranks_N == 1).all()


def test_a_grammar_stays_with_its_row_of_logits() -> None:
    """Every second token is under a mask of its own."""
    masks = tuple(bytes([number]) if number % 2 else None for number in range(1, 9))
    row = TokenSequence(
        tokens_T=np.arange(9, dtype=np.int32),
        wanted_N=np.arange(1, 9),
        temperature=1.0,
        allowed_N=masks,
    )
    grammar_by_target: dict[int, int] = {}
    for share in shares_of(packed([row]), 2):
        own, _ = share.own_projections()
        for row_of_logits, allowed_W in zip(
            own.restricted_M,
            own.allowed_MW,
            strict=True,
        ):
            [token] = own.targets_N[own.projection_N == row_of_logits]
            grammar_by_target[int(token)] = int(allowed_W[0])
    assert grammar_by_target == {1: 1, 3: 3, 5: 5, 7: 7}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_long_sample_is_divided_evenly(ranks: int) -> None:
    """Tokens to within one of each piece, and keys seen to within a percent."""
    length = 2001
    row = TokenSequence(
        tokens_T=np.arange(length, dtype=np.int32),
        wanted_N=np.array([length - 1]),
        temperature=1.0,
    )
    shares = shares_of(packed([row]), ranks)
    assert len(shares[0].places_Q) <= (length - 1) // ranks + 2
    num_keys: list[int] = []
    for share in shares:
        own_blocks = share.own_blocks(share.micro_batch.blocks)
        keys_by_query = sights(list(own_blocks))
        num_keys.append(sum(map(len, keys_by_query)))
    mean = sum(num_keys) / ranks
    assert max(num_keys) < 1.01 * mean


def test_a_rank_without_data_computes_padding() -> None:
    for share in shares_of(EMPTY_MICRO_BATCH, 2, multiple=2):
        assert len(share.places_Q) == 2
        own, is_own_N = share.own_projections()
        assert len(own.project_U) == len(is_own_N) == 0
