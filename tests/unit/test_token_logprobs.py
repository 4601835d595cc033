"""Log-prob, entropy and gradient of chosen tokens against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from invrl.train import logprobs
from invrl.train.logprobs import token_logprobs


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 3, 8 << 20], ids=["a row", "three rows", "all"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_equals_float64(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, rows: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", chunk_bytes)
    generator = torch.Generator().manual_seed(rows)
    logits_NV = torch.randn(rows, 50, generator=generator) * 5
    targets_N = torch.randint(0, 50, (rows,), generator=generator)
    temperature_N = torch.rand(rows, generator=generator) + 0.5
    weight_N = torch.randn(rows, generator=generator)

    exact_NV = logits_NV.double().requires_grad_()
    expected_NV = (exact_NV / temperature_N.double()[:, None]).log_softmax(1)
    expected_N = expected_NV.gather(1, targets_N[:, None])[:, 0]
    (expected_N * weight_N).sum().backward()

    given_NV = logits_NV.clone().requires_grad_()
    # A copy in between: the backward pass writes over what it was given.
    logprobs_N, entropy_N = token_logprobs(given_NV * 1.0, targets_N, temperature_N)
    (logprobs_N * weight_N).sum().backward()
    assert given_NV.grad is not None
    assert exact_NV.grad is not None
    torch.testing.assert_close(logprobs_N.double(), expected_N, rtol=1e-6, atol=1e-5)
    entropy = -(expected_NV.exp() * expected_NV).sum(1)
    torch.testing.assert_close(entropy_N.double(), entropy.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given_NV.grad.double(), exact_NV.grad, rtol=1e-5, atol=1e-6)
    assert not entropy_N.requires_grad


def test_bf16_logits_are_worked_on_in_float32() -> None:
    """One bf16 rounding step at 30 nats is 0.125: a sum in bf16 would be far off."""
    logits_NV = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    targets_N = torch.arange(4)
    logprobs_N, _ = token_logprobs(logits_NV, targets_N, torch.ones(4))
    expected_N = logits_NV.double().log_softmax(1).gather(1, targets_N[:, None])[:, 0]
    assert logprobs_N.dtype == torch.float32
    assert (logprobs_N.double() - expected_N).abs().max() < 1e-5
