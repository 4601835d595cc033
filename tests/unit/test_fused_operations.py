"""What is one kernel on a GPU, beside the operations that it stands in for. Here
torch.compile traces it and makes no code, except where a test compiles it for the
CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from logprob_problem import Problem, assert_equal, set_block_tokens
from slow_cases import first_quick
from torch._dynamo.utils import counters

from invrl.train.batches.micro_batch import MicroBatch, TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.model import logprobs
from invrl.train.runtime import device


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "fuses", lambda: True)
    torch._dynamo.reset()
    counters.clear()


def shared_rows(length: int, num_candidates: int = 0) -> MicroBatch:
    """Two equal rows, one that leaves them in its middle, and one at another
    temperature."""
    rng = np.random.default_rng(length)
    tokens_T = rng.integers(0, 43, length).astype(np.int32)
    other_T = tokens_T.copy()
    other_T[length // 2 :] = rng.integers(0, 43, length - length // 2)
    wanted_N = np.arange(3, length)
    rows = [
        TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N, temperature=0.8),
        TokenSequence(tokens_T=tokens_T, wanted_N=wanted_N, temperature=0.8),
        TokenSequence(tokens_T=other_T, wanted_N=wanted_N, temperature=0.8),
        TokenSequence(tokens_T=other_T, wanted_N=wanted_N, temperature=1.3),
    ]
    if num_candidates:
        candidates_NK = np.tile(
            np.arange(num_candidates, dtype=np.int32), (len(wanted_N), 1)
        )
        rows = [replace(row, candidates_NK=candidates_NK) for row in rows]
    (micro_batch,) = pack(rows, max_tokens=1000, share_prefixes=True)
    assert len(micro_batch.targets_N) > len(micro_batch.project_U), (
        "some rows of logits have several targets"
    )
    return micro_batch


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("block_tokens", first_quick([16, 64, 5]))
@pytest.mark.parametrize("num_candidates", first_quick([4, 0]))
@pytest.mark.parametrize("entropy_weight", first_quick([0.3, 0.0]))
def test_fused_logprobs_and_gradients_equal_their_formulas(
    monkeypatch: pytest.MonkeyPatch,
    block_tokens: int,
    num_candidates: int,
    entropy_weight: float,
) -> None:
    set_block_tokens(monkeypatch, block_tokens)
    problem = Problem.random(
        shared_rows(30, num_candidates), entropy_weight=entropy_weight
    )
    assert_equal(problem.measured(), problem.exact())
    assert counters["stats"]["unique_graphs"] >= 2, (
        "forward and backward pass are compiled"
    )


@pytest.mark.usefixtures("as_on_a_gpu")
def test_fused_kernels_are_shared_by_all_micro_batch_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_block_tokens(monkeypatch, 16)
    for length in (30, 24, 37, 50, 41):
        Problem.random(shared_rows(length)).measured()
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.usefixtures("as_on_a_gpu")
def test_bfloat16_gradients_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target's own term is added before."""
    set_block_tokens(monkeypatch, 64)
    problem = Problem.random(shared_rows(30), torch.bfloat16)
    fused = problem.measured()
    monkeypatch.setattr(device, "fuses", lambda: False)
    plain = problem.measured()
    torch.testing.assert_close(
        fused.weight_grad_VH, plain.weight_grad_VH, rtol=1e-2, atol=1e-3
    )
    torch.testing.assert_close(
        fused.hidden_grad_UH, plain.hidden_grad_UH, rtol=1e-2, atol=1e-3
    )


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("softcap", first_quick([3.0, None]))
def test_fused_logprobs_apply_the_soft_cap(softcap: float | None) -> None:
    problem = Problem.random(shared_rows(30), softcap=softcap)
    assert_equal(problem.measured(), problem.exact())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("is_zero_centered", first_quick([True, False]))
@torch._dynamo.config.patch(error_on_recompile=True)
def test_fused_norm_and_rotation_of_queries_and_keys_equal_megatrons(
    is_zero_centered: bool,
) -> None:
    device.prepare()
    from megatron.core.models.common.embeddings.rope_utils import (
        _apply_rotary_pos_emb_bshd,
    )

    from invrl.train.layers.attention import _split_and_turned

    groups = 2
    queries_of_group = 3
    dim = 8
    rotated_dim = 6
    norms = [torch.rand(dim, requires_grad=True) for _ in range(2)]
    for num_tokens in (5, 24):
        angles = torch.rand(num_tokens, 1, 1, rotated_dim // 2).repeat(1, 1, 1, 2) * 50
        mixed = torch.randn(
            num_tokens, 1, groups, (queries_of_group + 2) * dim, requires_grad=True
        )
        query, key, value = mixed.split([queries_of_group * dim, dim, dim], dim=-1)
        vectors = [query.reshape(num_tokens, 1, -1, dim), key]
        scales = [1 + norm if is_zero_centered else norm for norm in norms]
        expected = [
            _apply_rotary_pos_emb_bshd(
                torch.nn.functional.rms_norm(vector, (dim,), scale, 1e-5), angles
            )
            for vector, scale in zip(vectors, scales, strict=True)
        ]
        expected.append(value)
        turned = _split_and_turned(
            mixed,
            angles.cos(),
            angles.sin(),
            *norms,
            head_dim=dim,
            eps=1e-5,
            is_zero_centered=is_zero_centered,
        )
        output_grads = [torch.randn_like(output) for output in expected]
        torch.testing.assert_close(turned, tuple(expected))
        inputs = [mixed, *norms]
        torch.testing.assert_close(
            torch.autograd.grad(turned, inputs, output_grads),
            torch.autograd.grad(expected, inputs, output_grads),
        )


@pytest.mark.usefixtures("as_on_a_gpu")
@torch._dynamo.config.patch(error_on_recompile=True)
def test_fused_interleaved_rotation_equals_megatrons() -> None:
    device.prepare()
    from megatron.core.models.common.embeddings.rope_utils import (
        _apply_rotary_pos_emb_bshd,
    )

    from invrl.train.layers.latent_attention import turned_neighbours

    for num_tokens in (5, 24):
        angles = torch.rand(num_tokens, 1, 1, 4).repeat(1, 1, 1, 2) * 50
        vectors = torch.randn(num_tokens, 1, 3, 8)
        expected = _apply_rotary_pos_emb_bshd(
            vectors, angles, multi_latent_attention=True
        )
        torch.testing.assert_close(
            turned_neighbours(vectors, angles.cos(), angles.sin()), expected
        )


def test_fused_swiglu_and_its_gradient_equal_the_formula() -> None:
    """Megatron's own, which torch compiles on a GPU when it is first called."""
    device.prepare()
    from megatron.core.fusions import fused_bias_swiglu

    gates_and_values = torch.randn(6, 1, 20, dtype=torch.float64, requires_grad=True)
    output_grad = torch.randn(6, 1, 10, dtype=torch.float64)
    gates, values = gates_and_values.chunk(2, dim=-1)
    expected = gates * torch.sigmoid(gates) * values
    activations = fused_bias_swiglu.bias_swiglu_impl(gates_and_values, None)
    torch.testing.assert_close(activations, expected)
    torch.testing.assert_close(
        torch.autograd.grad(activations, gates_and_values, output_grad),
        torch.autograd.grad(expected, gates_and_values, output_grad),
    )


@pytest.mark.slow
def test_fused_functions_compiled_by_torch_equal_their_eager_results() -> None:
    """Into code of the CPU, as on a GPU into Triton's."""
    torch._dynamo.reset()  # what other tests have compiled of Megatron's functions
    device.prepare()
    from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

    logits_UW = torch.randn(12, 40)
    numbers = [torch.rand(12) + 0.5 for _ in range(5)]
    for function, arguments in (
        (logprobs._statistics, (logits_UW, numbers[0])),
        (logprobs._gradient_without_targets, (logits_UW, *numbers)),
        (swiglu, (logits_UW,)),
        (swiglu_back, (logits_UW[:, :20], logits_UW)),
    ):
        compiled = torch.compile(function, dynamic=True)
        torch.testing.assert_close(compiled(*arguments), function(*arguments))


def test_fused_gradient_clipping_equals_megatrons() -> None:
    device.prepare()
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    from invrl.train.runtime.megatron_repairs import norm_of_all, scale_all

    gradients = [torch.randn(shape) for shape in ((3, 5), (7,), ())]
    flag = torch.zeros(1, dtype=torch.int)
    expected_norm, _ = local_multi_tensor_l2_norm(0, flag, [gradients], False)
    norm, _ = norm_of_all(0, flag, [gradients], False)
    torch.testing.assert_close(norm, expected_norm)
    expected = [torch.empty_like(gradient) for gradient in gradients]
    local_multi_tensor_scale(0, flag, [gradients, expected], 0.3)
    scale_all(0, flag, [gradients, gradients], 0.3)
    torch.testing.assert_close(gradients, expected)
