"""Log-prob and entropy of chosen tokens under temperature, without a float32 copy of the logits.

A row of logits may predict several tokens: rollouts that begin alike share it. U rows of logits, N tokens.

On CUDA the gradient is not the same to the last bit each time: of tokens that share a row of logits the terms
are added (`index_add_`) in whatever order the GPU comes to them. On CPU their order is fixed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from invrl.train.packing import Projection

CHUNK_BYTES = 8 << 20
"""Float32 logits worked on at a time: about what stays in a core's cache, and far above a launch."""
_FLOOR = -1e30
"""The logit of a token that cannot be sampled: its exp is 0, and times 0 it is 0, unlike infinity."""


def projected_logprobs(
    hidden_UH: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], parts: Sequence[Projection]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, for a micro-batch's wanted tokens in their order. `project` gives the logits of
    rows of `hidden_UH`, [U, V]. One part's logits at a time are in memory: with more than one part, each is
    projected again in the backward pass instead of being kept, which is a third more work per logit."""
    if len(parts) == 1:
        return _part_logprobs(project, parts[0], hidden_UH)
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for part, part_UH in zip(parts, hidden_UH.split([len(one.temperature_U) for one in parts]), strict=True):
        of_part = partial(_part_logprobs, project, part)
        logprobs_N, entropy_N = checkpoint(of_part, part_UH, use_reentrant=False, preserve_rng_state=False)
        logprobs.append(logprobs_N)
        entropies.append(entropy_N)
    order_N = np.concatenate([part.tokens_N for part in parts]).argsort()
    place_N = torch.from_numpy(order_N).to(hidden_UH.device)
    return torch.cat(logprobs)[place_N], torch.cat(entropies)[place_N]


def _part_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], part: Projection, hidden_UH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_UV = project(hidden_UH)
    arrays = (part.masked_M, part.kept_MW, part.row_N, part.targets_N, part.temperature_U)
    moved = [torch.from_numpy(array).to(hidden_UH.device) for array in arrays]
    masked_M, kept_MW, row_N, targets_N, temperature_U = moved
    if len(part.masked_M):
        keep_only(logits_UV, masked_M, kept_MW)
    return token_logprobs(logits_UV, row_N, targets_N, temperature_U)


def token_logprobs(
    logits_UV: torch.Tensor, row_N: torch.Tensor, targets_N: torch.Tensor, temperature_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N] each: log softmax(logits / temperature) of row `row_N` at the targets, and the entropy of
    that distribution in nats (without gradient). Computed in float32 whatever the logits are; the backward
    pass writes the gradient over `logits_UV`, so nothing else may use them."""
    return _TokenLogprobs.apply(logits_UV, row_N, targets_N, temperature_U)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def keep_only(logits_UV: torch.Tensor, masked_M: torch.Tensor, kept_MW: torch.Tensor) -> None:
    """Takes from rows `masked_M`, in place, every token that is not kept: its probability is 0, and so is the
    gradient that `token_logprobs` gives it. `kept_MW`: uint8, a bit per token, the lowest first."""
    floor = max(_FLOOR, torch.finfo(logits_UV.dtype).min / 4)
    vocab = logits_UV.shape[1]
    bits = torch.arange(8, dtype=torch.uint8, device=logits_UV.device)
    for chunk in _chunks(logits_UV[: len(masked_M)]):
        kept = kept_MW[chunk, :, None].bitwise_right_shift(bits).bitwise_and(1).flatten(1)[:, :vocab].bool()
        rows_M = masked_M[chunk]
        logits_UV[rows_M] = logits_UV[rows_M].masked_fill(~kept, floor)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_UV: torch.Tensor,
        row_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature_U: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logsum_U = torch.empty(len(logits_UV), dtype=torch.float32, device=logits_UV.device)
        entropy_U = torch.empty_like(logsum_U)
        for rows in _chunks(logits_UV):
            scaled = logits_UV[rows].float() / temperature_U[rows, None]
            logsum_U[rows] = scaled.logsumexp(dim=1)
            scaled -= logsum_U[rows, None]  # now log-probs
            entropy_U[rows] = -torch.linalg.vecdot(scaled.exp(), scaled)
        picked_N = logits_UV[row_N, targets_N].float() / temperature_U[row_N]
        logprobs_N = picked_N - logsum_U[row_N]
        entropy_N = entropy_U[row_N]
        ctx.save_for_backward(logits_UV, row_N, targets_N, temperature_U, logsum_U)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_UV, row_N, targets_N, temperature_U, logsum_U = ctx.saved_tensors
        count, vocab = logits_UV.shape
        scale_N = grads[0] / temperature_U[row_N]
        scale_U = torch.zeros_like(logsum_U).index_add_(0, row_N, scale_N)
        # Tokens in the order of their rows, so that those of a chunk are neighbours.
        order_N = row_N.argsort(stable=True)
        row_N, targets_N, scale_N = row_N[order_N], targets_N[order_N], scale_N[order_N]
        chunks = _chunks(logits_UV)
        bounds = torch.tensor([*(rows.start for rows in chunks), count], device=row_N.device)
        ends = torch.searchsorted(row_N, bounds).tolist()
        for at, rows in enumerate(chunks):
            grad = logits_UV[rows].float()
            grad /= temperature_U[rows, None]
            grad -= logsum_U[rows, None]
            grad.exp_().mul_(-scale_U[rows, None])
            tokens = slice(ends[at], ends[at + 1])
            places = (row_N[tokens] - rows.start) * vocab + targets_N[tokens]
            grad.view(-1).index_add_(0, places, scale_N[tokens])
            logits_UV[rows] = grad
        return logits_UV, None, None, None


def _chunks(logits_UV: torch.Tensor) -> list[slice]:
    count, vocab = logits_UV.shape
    size = max(1, CHUNK_BYTES // (4 * vocab))
    return [slice(at, min(count, at + size)) for at in range(0, count, size)]
