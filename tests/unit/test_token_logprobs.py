"""Log-prob, entropy and gradient of chosen tokens against float64 autograd."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from invrl.train import logprobs
from invrl.train.logprobs import projected_logprobs, token_logprobs
from invrl.train.micro_batch import Row
from invrl.train.packing import pack


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 3, 8 << 20], ids=["a row", "three rows", "all"])
@pytest.mark.parametrize(("rows", "picks"), [(0, 0), (1, 1), (7, 7), (1, 6), (7, 40), (7, 3)])
def test_equals_float64(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, rows: int, picks: int) -> None:
    """A row of logits predicts any number of tokens, none and equal ones too."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(rows)
    logits_UV = torch.randn(rows, 50, generator=generator) * 5
    row_N = torch.randint(0, max(rows, 1), (picks,), generator=generator)
    targets_N = torch.randint(0, 50, (picks,), generator=generator)
    targets_N[1::3] = targets_N[0:1].expand(len(targets_N[1::3]))
    temperature_U = torch.rand(rows, generator=generator) + 0.5
    weight_N = torch.randn(picks, generator=generator)

    exact_UV = logits_UV.double().requires_grad_()
    expected_NV = (exact_UV / temperature_U.double()[:, None]).log_softmax(1)[row_N]
    expected_N = expected_NV.gather(1, targets_N[:, None])[:, 0]
    (expected_N * weight_N).sum().backward()

    given_UV = logits_UV.clone().requires_grad_()
    # A copy in between: the backward pass writes over what it was given.
    logprobs_N, entropy_N = token_logprobs(given_UV * 1.0, row_N, targets_N, temperature_U)
    (logprobs_N * weight_N).sum().backward()
    assert given_UV.grad is not None
    assert exact_UV.grad is not None
    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=1e-6, atol=1e-5)
    entropy = -(expected_NV.exp() * expected_NV).sum(1)
    torch.testing.assert_close(entropy_N.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given_UV.grad.double(), exact_UV.grad, rtol=1e-5, atol=1e-6)
    assert not entropy_N.requires_grad


def test_the_gradient_of_bf16_logits_is_rounded_once() -> None:
    """Two tokens that nearly cancel: what is left of 1 - p must not be lost in bfloat16."""
    logits_UV = torch.tensor([[6.0, 0.0, 0.0]]).bfloat16()
    given_UV = logits_UV.clone().requires_grad_()
    row_N, targets_N = torch.tensor([0, 0]), torch.tensor([0, 0])
    logprobs_N, _ = token_logprobs(given_UV * 1.0, row_N, targets_N, torch.ones(1))
    logprobs_N.sum().backward()
    assert given_UV.grad is not None
    exact_UV = -2 * logits_UV.double().softmax(1)
    exact_UV[0, 0] += 2
    torch.testing.assert_close(given_UV.grad.double(), exact_UV, rtol=2**-8, atol=0)


def test_bf16_logits_are_worked_on_in_float32() -> None:
    """One bf16 rounding step at 30 nats is 0.125: a sum in bf16 would be far off."""
    logits_NV = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    targets_N = torch.arange(4)
    logprobs_N, _ = token_logprobs(logits_NV, torch.arange(4), targets_N, torch.ones(4))
    expected_N = logits_NV.double().log_softmax(1).gather(1, targets_N[:, None])[:, 0]
    assert logprobs_N.dtype == torch.float32
    assert (logprobs_N.double() - expected_N).abs().max() < 1e-5


@pytest.mark.parametrize("most", [1, 7, 100], ids=["one by one", "in parts", "at once"])
def test_a_projection_in_parts_equals_float64_and_keeps_one_part(most: int) -> None:
    """Two rows that share a beginning, at two temperatures, some of their tokens under a mask."""
    vocab, hidden = 40, 16
    rng = np.random.default_rng(5)
    tokens_T = rng.integers(0, vocab, 30).astype(np.int32)
    other_T = tokens_T.copy()
    other_T[18:] = rng.integers(0, vocab, 12)
    kept = (np.packbits(rng.random(vocab) < 0.7, bitorder="little") | 0b1).tobytes()
    wanted_N = np.arange(5, 30)
    rows = [
        Row(tokens_T=tokens_T, wanted_N=wanted_N, temperature=0.8),
        Row(tokens_T=other_T, wanted_N=wanted_N, temperature=1.0, allowed_N=(*[None] * 24, kept)),
        Row(tokens_T=tokens_T, wanted_N=wanted_N, temperature=1.0),
    ]
    other_T[29] = 0  # which the mask keeps
    (micro_batch,) = pack(rows, max_tokens=1000, max_projections=1000, share_prefixes=True)
    assert len(micro_batch.restricted_M) == 1
    assert len(micro_batch.project_U) > 2 * 7

    generator = torch.Generator().manual_seed(1)
    hidden_UH = torch.randn(len(micro_batch.project_U), hidden, generator=generator)
    weight_VH = torch.randn(vocab, hidden, generator=generator)
    grad_N = torch.randn(len(micro_batch.targets_N), generator=generator)

    exact_UH = hidden_UH.double().requires_grad_()
    exact_VH = weight_VH.double().requires_grad_()
    exact_UV = exact_UH @ exact_VH.T
    bits = np.unpackbits(micro_batch.allowed_MW, axis=1, count=vocab, bitorder="little").astype(bool)
    removed_UV = torch.zeros(exact_UV.shape, dtype=torch.bool)
    removed_UV[torch.from_numpy(micro_batch.restricted_M)] = torch.from_numpy(~bits)
    temperature_U = torch.from_numpy(micro_batch.temperature_U).double()
    exact_UV = exact_UV.masked_fill(removed_UV, -1e30) / temperature_U[:, None]
    expected_NV = exact_UV.log_softmax(1)[torch.from_numpy(micro_batch.projection_N)]
    expected_N = expected_NV.gather(1, torch.from_numpy(micro_batch.targets_N)[:, None])[:, 0]
    (expected_N * grad_N).sum().backward()
    expected_entropy_N = -(expected_NV.exp() * expected_NV).sum(1).detach()

    projected: list[int] = []
    alive: list[weakref.ref[torch.Tensor]] = []
    others_alive: list[int] = []

    def project(part_UH: torch.Tensor) -> torch.Tensor:
        others_alive.append(sum(one() is not None for one in alive))
        logits_UV = part_UH @ given_VH.T
        projected.append(len(logits_UV))
        alive.append(weakref.ref(logits_UV))
        return logits_UV

    given_UH = hidden_UH.clone().requires_grad_()
    given_VH = weight_VH.clone().requires_grad_()
    parts = micro_batch.projections(most)
    logprobs_N, entropy_N = projected_logprobs(given_UH, project, parts)
    (logprobs_N * grad_N).sum().backward()
    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_N.double(), expected_entropy_N, rtol=1e-4, atol=1e-5)
    assert given_UH.grad is not None
    assert given_VH.grad is not None
    torch.testing.assert_close(given_UH.grad.double(), exact_UH.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given_VH.grad.double(), exact_VH.grad, rtol=1e-4, atol=1e-5)
    assert max(projected) <= most
    passes = 1 if len(parts) == 1 else 2
    assert sum(projected) == passes * len(hidden_UH)
    assert max(others_alive) == 0, "logits of another part were still in memory"

    with torch.no_grad():
        again_N, _ = projected_logprobs(given_UH, project, parts)
    assert sum(projected) == (passes + 1) * len(hidden_UH), (
        "without a backward pass nothing is computed twice"
    )
    torch.testing.assert_close(again_N, logprobs_N.detach(), rtol=0, atol=0)
