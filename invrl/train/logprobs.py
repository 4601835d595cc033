"""Log-prob and entropy of chosen tokens under temperature, without a float32 copy of the logits.

Called by `model.py` on the output rows that predict a wanted token."""

from typing import Any

import torch

CHUNK_BYTES = 8 << 20
"""Float32 logits worked on at a time: about what stays in a core's cache, and far above a launch."""


def token_logprobs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] each: log softmax(logits / temperature) at the targets, and the entropy of that
    distribution in nats (without gradient). Computed in float32 whatever the logits are; the backward
    pass writes the gradient over `logits_NV`, so nothing else may use them."""
    return _TokenLogprobs.apply(logits_NV, targets_N, temperature_N)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(targets_N)
        logprobs_N, entropy_N, logsum_N = (
            torch.empty(count, dtype=torch.float32, device=logits_NV.device) for _ in range(3)
        )
        for rows in _chunks(logits_NV):
            scaled = logits_NV[rows].float() / temperature_N[rows, None]
            logsum_N[rows] = scaled.logsumexp(dim=1)
            scaled -= logsum_N[rows, None]  # now log-probs
            logprobs_N[rows] = scaled.gather(1, targets_N[rows, None]).squeeze(1)
            entropy_N[rows] = -torch.linalg.vecdot(scaled.exp(), scaled)
        ctx.save_for_backward(logits_NV, targets_N, temperature_N, logsum_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, temperature_N, logsum_N = ctx.saved_tensors
        scale_N = grads[0] / temperature_N
        for rows in _chunks(logits_NV):
            grad = logits_NV[rows].float()
            grad /= temperature_N[rows, None]
            grad -= logsum_N[rows, None]
            grad.exp_().mul_(-scale_N[rows, None])
            grad.scatter_add_(1, targets_N[rows, None], scale_N[rows, None])
            logits_NV[rows] = grad
        return logits_NV, None, None


def _chunks(logits_NV: torch.Tensor) -> list[slice]:
    count, vocab = logits_NV.shape
    size = max(1, CHUNK_BYTES // (4 * vocab))
    return [slice(at, min(count, at + size)) for at in range(0, count, size)]
