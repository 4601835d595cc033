"""Windowed attention calls of packed prefix trees, against each row alone: which keys a
query sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from invrl.train.batches import packing
from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch, TokenSequence
from invrl.train.layers import sliding_window
from invrl.train.layers.sliding_window import windowed

TOKENS = st.lists(st.integers(0, 1), min_size=2, max_size=12)


def pack_one(rows: list[list[int]]) -> MicroBatch:
    """All rows in one micro-batch; everything but the first token is wanted."""
    packed = packing.pack(
        [
            TokenSequence(
                tokens_T=np.array(row, np.int32),
                wanted_N=np.arange(1, len(row)),
                temperature=1.0,
            )
            for row in rows
        ],
        max_tokens=1000,
        share_prefixes=True,
    )
    assert len(packed) == 1
    return packed[0]


def seen_by(blocks: list[AttentionBlock], num_tokens: int) -> NDArray[np.bool_]:
    """[query, key]: which places see which. Each query is in one call, and a call names
    each key once."""
    seen_PP = np.zeros((num_tokens, num_tokens), np.bool_)
    queries: list[int] = []
    for block in blocks:
        own_K = np.arange(block.start, block.end)
        keys_K = np.concatenate([block.prefix_K, own_K])
        assert len(set(keys_K.tolist())) == len(keys_K)
        mask_QK = block.mask_QK
        if mask_QK is None:
            mask_QK = np.tri(
                len(own_K), len(keys_K), len(block.prefix_K), dtype=np.bool_
            )
        assert mask_QK.shape == (len(own_K), len(keys_K))
        for query, row_K in zip(own_K, mask_QK, strict=True):
            seen_PP[query, keys_K[row_K]] = True
        queries += own_K.tolist()
    assert queries == list(range(num_tokens))
    return seen_PP


@given(
    rows=st.lists(TOKENS, min_size=1, max_size=6),
    window=st.integers(1, 14),
    chunk=st.sampled_from([1, 3, 1024]),
    dense=st.sampled_from([0, 256]),
)
@settings(deadline=None, max_examples=200)
def test_token_attends_to_its_last_ancestors_within_the_window(
    rows: list[list[int]], window: int, chunk: int, dense: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding_window, "QUERY_CHUNK", chunk)
        patch.setattr(packing, "DENSE_TREE_TOKENS", dense)
        micro_batch = pack_one(rows)
        positions_P = micro_batch.positions_P
        everything_PP = seen_by(list(micro_batch.blocks), len(positions_P))
        limited_PP = seen_by(
            windowed(micro_batch.blocks, positions_P, window), len(positions_P)
        )
    near_PP = positions_P[:, None] - positions_P[None, :] < window
    assert np.array_equal(limited_PP, everything_PP & near_PP)


def test_window_longer_than_every_sample_changes_no_attention_call() -> None:
    micro_batch = pack_one([[1, 2, 3, 4, 5], [1, 2, 9, 9]])
    limited = windowed(micro_batch.blocks, micro_batch.positions_P, 4)
    assert [
        block is same for block, same in zip(limited, micro_batch.blocks, strict=True)
    ] == [True]


def test_keys_outside_of_every_window_are_left_out_of_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a long row costs its length times the window, not its length squared."""
    monkeypatch.setattr(sliding_window, "QUERY_CHUNK", 10)
    micro_batch = pack_one([[7] * 101])
    calls = windowed(micro_batch.blocks, micro_batch.positions_P, 5)
    assert [block.end - block.start for block in calls] == [10] * 10
    assert [len(block.prefix_K) for block in calls] == [0] + [4] * 9
