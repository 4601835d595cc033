"""FlexAttention's mask and its results, beside the SDPA call per block that they stand
in for.

torch 2.13 computes FlexAttention on a CPU from the whole matrix of scores, and refuses
its backward pass there although it has one: `forward_and_backward` lifts that check.
The compiled kernel needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_rows import rows, shares_of, sights
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from invrl.train.batches.micro_batch import AttentionBlock, MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.layers import flex_attention as tree_attention
from invrl.train.layers.flex_attention import TreeMask, _compiled_attention
from invrl.train.layers.sliding_window import windowed
from invrl.train.parallel.context_share import ContextShare
from invrl.train.runtime import device
from invrl.train.runtime.kernels import FLEX_TILE

if TYPE_CHECKING:
    from invrl.train.layers.attention import RowAttention

CPU = torch.device("cpu")
SCALE = 0.3


def forest() -> MicroBatch:
    """A prompt of 300 tokens with three answers, two of which share a start, and a row
    of its own."""
    rng = np.random.default_rng(0)
    prompt_T = rng.integers(0, 9, 300)
    start_T = rng.integers(0, 9, 40)
    ends = [rng.integers(0, 9, 170) for _ in range(4)]
    sequences = [
        np.concatenate([prompt_T, start_T, ends[0]]),
        np.concatenate([prompt_T, start_T, ends[1]]),
        np.concatenate([prompt_T, ends[2]]),
        ends[3],
    ]
    packed = [
        TokenSequence(
            tokens_T=tokens_T.astype(np.int32),
            wanted_N=np.array([len(tokens_T) - 1]),
            temperature=1.0,
        )
        for tokens_T in sequences
    ]
    (micro_batch,) = pack(packed, max_tokens=10_000, share_prefixes=True)
    return micro_batch


def blocks_of(share: ContextShare, window: int | None) -> Sequence[AttentionBlock]:
    blocks: Sequence[AttentionBlock] = share.micro_batch.blocks
    if window is not None:
        blocks = windowed(blocks, share.micro_batch.positions_P, window)
    return share.own_blocks(blocks)


def calls_of(share: ContextShare, window: int | None) -> RowAttention:
    """In float32 on the CPU."""
    device.prepare()
    from invrl.train.layers.sdpa import AttentionCalls

    return AttentionCalls.of(
        blocks_of(share, window), share.gathered_P, CPU, torch.float32
    )


def seen_by_mask(tree_mask: TreeMask) -> torch.Tensor:
    """[queries, keys], padding included."""
    num_queries, num_keys = tree_mask.mask.seq_lengths
    none = torch.zeros((), dtype=torch.int32)
    query_Q = torch.arange(num_queries)[:, None]
    return tree_mask.mask.mask_mod(none, none, query_Q, torch.arange(num_keys)[None, :])


@given(
    data=rows(),
    ranks=st.integers(1, 3),
    window=st.sampled_from([None, 1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_mask_shows_each_query_the_keys_of_its_block(
    data: list[TokenSequence], ranks: int, window: int | None
) -> None:
    (micro_batch,) = pack(data, max_tokens=1000, share_prefixes=True)
    for share in shares_of(micro_batch, ranks):
        expected = sights(list(blocks_of(share, window)))
        seen_QK = seen_by_mask(TreeMask.of(share, window, CPU)).numpy()
        gathered_P = share.gathered_P
        if gathered_P is None:
            gathered_P = np.arange(len(micro_batch.tokens_P))
        assert not seen_QK[len(expected) :].any(), "padding sees nothing"
        for seen_K, places in zip(seen_QK, expected, strict=False):
            assert set(np.flatnonzero(seen_K)) == set(gathered_P[sorted(places)])


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("ranks", [1, 2])
def test_mask_tiles_equal_those_computed_by_torch(
    ranks: int, window: int | None
) -> None:
    for share in shares_of(forest(), ranks):
        mask = TreeMask.of(share, window, CPU).mask
        assert isinstance(mask.seq_lengths, tuple)
        num_queries, num_keys = mask.seq_lengths
        expected = create_block_mask(
            mask.mask_mod, None, None, num_queries, num_keys, device="cpu"
        )
        is_computed = mask.to_dense().bool()
        is_seen = expected.to_dense().bool()
        assert is_computed[is_seen].all(), (
            "every tile with a pair that is seen is computed"
        )
        if window is None:
            assert (is_computed == is_seen).all(), "and no other"
        assert mask.full_kv_num_blocks is not None
        assert expected.full_kv_num_blocks is not None
        assert (mask.full_kv_num_blocks == expected.full_kv_num_blocks).all()
        num_tiles = num_queries * num_keys // FLEX_TILE**2
        assert 0 < int(is_computed.sum()) < num_tiles, "some are left out"


def forward_and_backward(
    attention: RowAttention,
    share: ContextShare,
    target: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The output and the gradients of queries, keys and values, from the same random
    numbers each time."""
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int, length: int, dim: int) -> torch.Tensor:
        tensor = torch.randn(1, heads, length, dim, generator=generator)
        return tensor.to(target, dtype)

    num_queries = len(share.places_Q)
    num_keys = len(share.micro_batch.tokens_P)
    queries = drawn(4, num_queries, 32).requires_grad_()
    keys = drawn(2, num_keys, 32).requires_grad_()
    values = drawn(2, num_keys, 16).requires_grad_()
    output = attention.attend(queries, keys, values, scale=SCALE)
    gradients = torch.autograd.grad(
        output, (queries, keys, values), drawn(4, num_queries, 16)
    )
    return [output.detach(), *gradients]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("ranks", [1, 2])
def test_flex_attention_equals_one_call_per_block(
    ranks: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    share = shares_of(forest(), ranks)[-1]
    expected = forward_and_backward(calls_of(share, window), share, CPU, torch.float32)
    measured = forward_and_backward(
        TreeMask.of(share, window, CPU), share, CPU, torch.float32
    )
    for ours, theirs in zip(measured, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_one_kernel", [True, False])
def test_layers_of_each_window_size_have_their_own_mask(in_one_kernel: bool) -> None:
    device.prepare()
    from invrl.train.layers.attention import PackedRow

    (share,) = shares_of(forest(), 1)
    packed_row = PackedRow.of(
        share,
        CPU,
        torch.float32,
        windows=(None, 50),
        in_one_kernel=in_one_kernel,
        positions={},
        routing=None,
    )
    for window, attention in packed_row.attention.items():
        assert isinstance(attention, TreeMask) == in_one_kernel
        expected = forward_only(calls_of(share, window), share)
        torch.testing.assert_close(
            forward_only(attention, share), expected, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("num_rows", "dtype", "window", "calls_are_faster"),
    [
        (4, torch.bfloat16, None, True),
        (4, torch.float32, None, False),
        (4, torch.bfloat16, 50, False),
        (9, torch.bfloat16, None, False),
    ],
)
def test_few_long_samples_use_flash_attention_calls(
    num_rows: int, dtype: torch.dtype, window: int | None, calls_are_faster: bool
) -> None:
    device.prepare()
    from invrl.train.layers.attention import PackedRow

    rows = [
        TokenSequence(
            tokens_T=np.full(100, number, np.int32),
            wanted_N=np.array([99]),
            temperature=1.0,
        )
        for number in range(num_rows)
    ]
    (micro_batch,) = pack(rows, max_tokens=2000, share_prefixes=True)
    (share,) = shares_of(micro_batch, 1)
    packed_row = PackedRow.of(
        share,
        CPU,
        dtype,
        windows=(window,),
        in_one_kernel=True,
        positions={},
        routing=None,
    )
    assert isinstance(packed_row.attention[window], TreeMask) != calls_are_faster


def test_samples_that_share_a_prefix_use_one_kernel() -> None:
    device.prepare()
    from invrl.train.layers.attention import PackedRow

    (share,) = shares_of(forest(), 1)
    packed_row = PackedRow.of(
        share,
        CPU,
        torch.bfloat16,
        windows=(None,),
        in_one_kernel=True,
        positions={},
        routing=None,
    )
    assert isinstance(packed_row.attention[None], TreeMask)


def forward_only(attention: RowAttention, share: ContextShare) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    queries = torch.randn(1, 2, len(share.places_Q), 16, generator=generator)
    return attention.attend(queries, queries, queries, scale=SCALE)


def test_all_lengths_share_a_few_compiled_kernels() -> None:
    """torch stops compiling after eight, and then computes from the whole matrix of
    scores."""
    _compiled_attention.cache_clear()
    torch._dynamo.reset()
    counters["stats"].clear()
    for length in (700, 300, 1300, 1, 129, 1024, 901):
        row = TokenSequence(
            tokens_T=np.arange(length + 1, dtype=np.int32),
            wanted_N=np.array([length]),
            temperature=1.0,
        )
        (micro_batch,) = pack([row], max_tokens=2000, share_prefixes=True)
        (share,) = shares_of(micro_batch, 1)
        queries = torch.zeros(1, 2, length, 16)
        for window in (None, 64):
            TreeMask.of(share, window, CPU).attend(
                queries, queries, queries, scale=SCALE
            )
    assert counters["stats"]["unique_graphs"] <= 3


def test_kernels_of_both_passes_have_no_partial_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    options: dict[str, dict[str, Any]] = {}

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.name.startswith("flex_attention"):
                for length in (tensor.meta["val"].shape[2] for tensor in node.args[:3]):
                    assert isinstance(length, torch.SymInt), (
                        "it is compiled for all lengths"
                    )
                (options[node.name],) = [
                    part for part in node.args if isinstance(part, dict)
                ]
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(tree_attention._attend, dynamic=True, backend=backend)
    monkeypatch.setattr(tree_attention, "_compiled_attention", lambda: compiled)
    for share in shares_of(forest(), 2):
        tree = TreeMask.of(share, None, CPU)
        assert all(length % FLEX_TILE == 0 for length in tree.mask.seq_lengths)
        forward_and_backward(tree, share, CPU, torch.float32)
    assert set(options) == {"flex_attention", "flex_attention_backward"}
    assert all(of_pass["IS_DIVISIBLE"] for of_pass in options.values())


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch compiles FlexAttention with its backward pass for GPUs only",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_kernel_equals_the_float32_calls_within_rounding(
    ranks: int, window: int | None, dtype: torch.dtype
) -> None:
    target = torch.device("cuda")
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for share in shares_of(forest(), ranks):
        expected = forward_and_backward(
            calls_of(share, window), share, CPU, torch.float32
        )
        measured = forward_and_backward(
            TreeMask.of(share, window, target), share, target, dtype
        )
        for ours, theirs in zip(measured, expected, strict=True):
            error = (ours.cpu().float() - theirs).norm() / theirs.norm()
            assert error < tolerance
