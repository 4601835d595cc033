"""Context parallelism read back from the shares of all ranks: together they compute
what one rank would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import LAYOUTS, rows, shares_of, sights, visible

from invrl.train.batches import packing
from invrl.train.batches.micro_batch import EMPTY_MICRO_BATCH, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.layers.sliding_window import windowed


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
        (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    shares = shares_of(micro_batch, ranks, multiple)
    padded = shares[0].micro_batch
    assert len(padded.tokens_P) % (ranks * multiple) == 0
    places = np.concatenate([share.places_Q for share in shares])
    assert sorted(places.tolist()) == list(range(len(padded.tokens_P))), (
        "every token has one rank"
    )
    if ranks > 1:
        assert shares[0].gathered_P is not None
        assert (shares[0].gathered_P[places] == np.arange(len(places))).all(), (
            "gathered rank by rank"
        )
    whole_blocks = list(padded.blocks)
    if window is not None:
        whole_blocks = windowed(whole_blocks, padded.positions_P, window)
    expected = sights(whole_blocks)
    for share in shares:
        assert len(share.places_Q) * ranks == len(padded.tokens_P)
        assert (share.tokens_Q == padded.tokens_P[share.places_Q]).all()
        own_blocks = list(share.own_blocks(whole_blocks))
        queries = np.concatenate(
            [np.arange(block.start, block.end) for block in own_blocks]
        )
        assert (queries == share.places_Q).all(), "in the order of the rank's tokens"
        assert sights(own_blocks) == [expected[place] for place in queries]


@given(
    data=rows(),
    ranks=st.integers(1, 4),
    multiple=st.integers(1, 5),
)
def test_padding_is_a_separate_tree(
    data: list[TokenSequence], ranks: int, multiple: int
) -> None:
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    num_tokens = len(micro_batch.tokens_P)
    padded = shares_of(micro_batch, ranks, multiple)[0].micro_batch
    attended = visible(padded)
    for expected, seen_places in zip(
        visible(micro_batch), attended[:num_tokens], strict=True
    ):
        assert (seen_places == expected).all()
    for places in attended[num_tokens:]:
        assert places.min() >= num_tokens
    assert padded.sequences is micro_batch.sequences
    assert padded.project_U is micro_batch.project_U


@given(data=rows(), ranks=st.integers(1, 4))
def test_every_wanted_token_is_predicted_on_one_rank(
    data: list[TokenSequence], ranks: int
) -> None:
    """From the token before it, at its own temperature."""
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    places_N = micro_batch.project_U[micro_batch.projection_N]
    temperatures_N = micro_batch.temperature_U[micro_batch.projection_N]
    owners_N = np.zeros(len(micro_batch.targets_N), np.int64)
    for share in shares_of(micro_batch, ranks):
        own, is_own_N = share.own_projections()
        owners_N += is_own_N
        assert (own.targets_N == micro_batch.targets_N[is_own_N]).all()
        assert (own.project_U[own.projection_N] == places_N[is_own_N]).all()
        assert (own.temperature_U[own.projection_N] == temperatures_N[is_own_N]).all()
        assert (share.places_Q[share.own_indices(own.project_U)] == own.project_U).all()
        assert sum(len(wanted_N) for _, wanted_N in own.sequences) == is_own_N.sum()
    assert (owners_N == 1).all()


def test_a_grammar_stays_with_its_row_of_logits() -> None:
    """Every second token is under a mask of its own."""
    masks = tuple(bytes([number]) if number % 2 else None for number in range(1, 9))
    row = TokenSequence(
        tokens_T=np.arange(9, dtype=np.int32),
        wanted_N=np.arange(1, 9),
        temperature=1.0,
        allowed_N=masks,
    )
    (micro_batch,) = pack([row], max_tokens=100, share_prefixes=True)
    grammar_by_target: dict[int, int] = {}
    for share in shares_of(micro_batch, 2):
        own, _ = share.own_projections()
        for row_of_logits, allowed_W in zip(
            own.restricted_M, own.allowed_MW, strict=True
        ):
            [token] = own.targets_N[own.projection_N == row_of_logits]
            grammar_by_target[int(token)] = int(allowed_W[0])
    assert grammar_by_target == {1: 1, 3: 3, 5: 5, 7: 7}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_long_row_is_divided_evenly(ranks: int) -> None:
    """Tokens to within one of each piece, and keys seen to within a percent."""
    length = 2001
    row = TokenSequence(
        tokens_T=np.arange(length, dtype=np.int32),
        wanted_N=np.array([length - 1]),
        temperature=1.0,
    )
    (micro_batch,) = pack([row], max_tokens=length, share_prefixes=True)
    shares = shares_of(micro_batch, ranks)
    assert len(shares[0].places_Q) <= (length - 1) // ranks + 2
    keys = [
        sum(
            len(seen)
            for seen in sights(list(share.own_blocks(share.micro_batch.blocks)))
        )
        for share in shares
    ]
    assert max(keys) < 1.01 * sum(keys) / ranks


def test_a_rank_without_data_computes_padding() -> None:
    for share in shares_of(EMPTY_MICRO_BATCH, 2, multiple=2):
        assert len(share.places_Q) == 2
        own, is_own_N = share.own_projections()
        assert len(own.project_U) == len(is_own_N) == 0
