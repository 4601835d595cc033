"""Log-prob, entropy and gradient of chosen tokens against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from invrl.train import logprobs
from invrl.train.logprobs import token_logprobs


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
