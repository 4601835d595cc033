"""The SDPA calls of packed rows: each query sees the keys of its block's mask, and
masks stay small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import rows

from invrl.train.batches import packing
from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.layers import sdpa
from invrl.train.layers.sdpa import AttentionCall, AttentionCalls
from invrl.train.parallel.context_share import ContextShare

CPU = torch.device("cpu")


def calls_of(
    micro_batch: MicroBatch, ranks: int
) -> list[tuple[list[AttentionBlock], AttentionCalls]]:
    """For each context-parallel rank its blocks, and the calls that compute them."""
    calls_by_rank: list[tuple[list[AttentionBlock], AttentionCalls]] = []
    for rank in range(ranks):
        share = ContextShare.of(micro_batch, rank=rank, ranks=ranks, multiple=1)
        blocks = list(share.own_blocks(share.micro_batch.blocks))
        calls_by_rank.append(
            (blocks, AttentionCalls.of(blocks, share.gathered_P, CPU, torch.float32))
        )
    return calls_by_rank


def seen(calls: Sequence[AttentionCall]) -> list[list[int]]:
    """For each query of a block, the indices of the keys that it sees."""
    seen_by_query: list[list[int]] = []
    for call in calls:
        if call.bias_QK is None:
            visible_QK = torch.ones(call.num_queries, call.num_keys).tril() > 0
            assert call.num_queries == call.num_keys
        else:
            visible_QK = call.bias_QK == 0
            assert (call.bias_QK[~visible_QK] == -torch.inf).all()
        assert visible_QK.shape == (call.num_queries, call.num_keys)
        seen_by_query += [
            torch.nonzero(visible_K)[:, 0].tolist() for visible_K in visible_QK
        ]
    return seen_by_query


@given(
    data=rows(),
    chunk=st.sampled_from([1, 2, 3, 1024]),
    dense=st.sampled_from([0, 8, 10_000]),
    ranks=st.integers(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_each_query_attends_to_the_keys_of_its_block(
    data: list[TokenSequence], chunk: int, dense: int, ranks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdpa, "QUERY_CHUNK", chunk)
        patch.setattr(packing, "DENSE_TREE_TOKENS", dense)
        (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
        calls_by_rank = calls_of(micro_batch, ranks)
    for blocks, calls in calls_by_rank:
        for block, block_calls in zip(blocks, calls.blocks, strict=True):
            num_queries = block.end - block.start
            num_prefix = len(block.prefix_K)
            assert sum(call.num_queries for call in block_calls) == num_queries
            assert block_calls[-1].num_keys == num_prefix + num_queries
            mask_QK = block.mask_QK
            if mask_QK is None:
                mask_QK = np.tri(
                    num_queries, num_prefix + num_queries, num_prefix, dtype=bool
                )
            assert seen(block_calls) == [
                np.flatnonzero(mask_K).tolist() for mask_K in mask_QK
            ]


@pytest.mark.parametrize(
    ("key_dim", "value_dim"),
    [
        (24, 12),
        (12, 24),
    ],
)
def test_values_of_another_size_than_keys_do_not_materialize_scores(
    key_dim: int, value_dim: int
) -> None:
    """Against the formula in float64. Two branches behind a prompt, two heads of keys
    for four of queries."""
    prompt_T = np.zeros(100, np.int32)
    data = [
        TokenSequence(
            tokens_T=np.concatenate([prompt_T, np.full(150, branch, np.int32)]),
            wanted_N=np.arange(100, 250),
            temperature=1.0,
        )
        for branch in (1, 2)
    ]
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    [(_, calls)] = calls_of(micro_batch, 1)
    num_tokens = len(micro_batch.tokens_P)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, heads, num_tokens, dim, generator=generator).requires_grad_()
        for heads, dim in ((4, key_dim), (2, key_dim), (2, value_dim))
    ]
    saved: list[torch.Tensor] = []

    def record(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = calls.attend(*tensors, scale=0.3)
    assert output.shape == (1, 4, num_tokens, value_dim)
    assert max(tensor.numel() for tensor in saved) < num_tokens * num_tokens

    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    queries = exact[0].unflatten(1, (2, 2))
    keys, values = (tensor.unsqueeze(2) for tensor in exact[1:])
    places = np.arange(num_tokens)
    sees_QK = (places[None, :] <= places[:, None]) & (
        places[:, None] < micro_batch.ends_P[None, :]
    )
    scores = (0.3 * queries @ keys.mT).masked_fill(
        torch.from_numpy(~sees_QK), -torch.inf
    )
    expected = (scores.softmax(dim=-1) @ values).flatten(1, 2)
    weights = torch.randn(output.shape, generator=generator)
    gradients = torch.autograd.grad(output, tensors, weights)
    exact_gradients = torch.autograd.grad(expected, exact, weights.double())
    for gradient, wanted in zip(
        (output, *gradients), (expected, *exact_gradients), strict=True
    ):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-5)


def mask_bytes(micro_batch: MicroBatch, ranks: int) -> int:
    """Of the masks of the rank that has most."""
    most = 0
    for _, calls in calls_of(micro_batch, ranks):
        biases = [call.bias_QK for block in calls.blocks for call in block]
        storages = {
            bias.untyped_storage().data_ptr(): bias
            for bias in biases
            if bias is not None
        }
        most = max(
            most, sum(bias.untyped_storage().nbytes() for bias in storages.values())
        )
    return most


def test_long_sample_has_the_masks_of_one_call() -> None:
    """A row of 32,768 tokens on two ranks: 128 MiB, where explicit masks took 1.5
    GB."""
    length = 32_768
    row = TokenSequence(
        tokens_T=np.zeros(length + 1, np.int32),
        wanted_N=np.array([length]),
        temperature=1.0,
    )
    (micro_batch,) = pack([row], max_tokens=length, share_prefixes=True)
    assert 0 < mask_bytes(micro_batch, 2) <= sdpa.QUERY_CHUNK * length * 4


def test_trajectories_of_a_tree_share_one_mask() -> None:
    prompt = np.zeros(3000, np.int32)
    data = [
        TokenSequence(
            tokens_T=np.concatenate([prompt, np.full(3000, tail, np.int32)]),
            wanted_N=np.arange(3000, 6000),
            temperature=1.0,
        )
        for tail in (1, 2, 3)
    ]
    (micro_batch,) = pack(data, max_tokens=100_000, share_prefixes=True)
    assert len(micro_batch.tokens_P) == 3000 + 3 * 2999
    assert 0 < mask_bytes(micro_batch, 1) <= sdpa.QUERY_CHUNK * 6000 * 4
