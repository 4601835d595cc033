"""Log-probs and entropies of chosen tokens under temperature, without a float32 copy of the logits.

A row of logits may predict several tokens, because rollouts that begin alike share it. Axes: U rows of
logits, N tokens, V the vocabulary, H the hidden size, M rows of logits under a grammar.

On CUDA the gradient is not the same to the last bit each time: the terms of tokens that share a row of logits
are added (`index_add_`) in whatever order the GPU comes to them. On CPU their order is fixed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from invrl.train.micro_batch import Projection

CHUNK_BYTES = 8 << 20
"""Float32 logits that are worked on at a time: about what stays in a core's cache, and enough to make the
cost of a kernel launch negligible."""
_FLOOR = -1e30
"""The logit of a token that cannot be sampled. Its exp is 0, and 0 times it is 0, unlike with infinity."""


def projected_logprobs(
    hidden_UH: torch.Tensor, project: Callable[[torch.Tensor], torch.Tensor], parts: Sequence[Projection]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies (as `token_logprobs`) of a micro-batch's wanted tokens, in their order.

    `project` gives the logits [U, V] of rows of `hidden_UH`. The logits of one part at a time are in memory:
    with more than one part, each part is projected again in the backward pass instead of being kept, which is
    a third more work per logit.
    """
    if len(parts) == 1:
        return _part_logprobs(project, parts[0], hidden_UH)
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    part_sizes = [len(part.temperature_U) for part in parts]
    for part, part_UH in zip(parts, hidden_UH.split(part_sizes), strict=True):
        compute_part = partial(_part_logprobs, project, part)
        logprobs_N, entropy_N = checkpoint(
            compute_part, part_UH, use_reentrant=False, preserve_rng_state=False
        )
        logprobs.append(logprobs_N)
        entropies.append(entropy_N)
    # The parts hold the wanted tokens in another order; this is the way back.
    order_N = np.concatenate([part.tokens_N for part in parts]).argsort()
    place_N = torch.from_numpy(order_N).to(hidden_UH.device)
    return torch.cat(logprobs)[place_N], torch.cat(entropies)[place_N]


def _part_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], part: Projection, hidden_UH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    device = hidden_UH.device
    logits_UV = project(hidden_UH)
    if len(part.restricted_M):
        restrict_vocabulary(
            logits_UV,
            torch.from_numpy(part.restricted_M).to(device),
            torch.from_numpy(part.allowed_MW).to(device),
        )
    return token_logprobs(
        logits_UV,
        torch.from_numpy(part.row_N).to(device),
        torch.from_numpy(part.targets_N).to(device),
        torch.from_numpy(part.temperature_U).to(device),
    )


def token_logprobs(
    logits_UV: torch.Tensor, row_N: torch.Tensor, targets_N: torch.Tensor, temperature_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token: log softmax(logits / temperature) of row `row_N` at the target, and the entropy of that
    distribution in nats (without gradient); float32 [N] each.

    Computed in float32 whatever dtype the logits have. The backward pass writes the gradient over
    `logits_UV`, so nothing else may use the logits.
    """
    return _TokenLogprobs.apply(logits_UV, row_N, targets_N, temperature_U)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def restrict_vocabulary(
    logits_UV: torch.Tensor, restricted_M: torch.Tensor, allowed_MW: torch.Tensor
) -> None:
    """Removes, in place, every token that is not allowed from the rows `restricted_M`.

    The probability of a removed token is 0, and so is the gradient that `token_logprobs` gives it.
    `allowed_MW`: uint8, one bit per token, the lowest bit first.
    """
    floor = max(_FLOOR, torch.finfo(logits_UV.dtype).min / 4)
    vocab_size = logits_UV.shape[1]
    bit_numbers = torch.arange(8, dtype=torch.uint8, device=logits_UV.device)
    for chunk in _chunks(logits_UV[: len(restricted_M)]):
        bits = allowed_MW[chunk, :, None].bitwise_right_shift(bit_numbers).bitwise_and(1)
        is_allowed = bits.flatten(1)[:, :vocab_size].bool()
        rows = restricted_M[chunk]
        logits_UV[rows] = logits_UV[rows].masked_fill(~is_allowed, floor)


class _TokenLogprobs(torch.autograd.Function):
    """Works on chunks of rows, so that only a chunk of the logits exists in float32."""

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
            scaled -= logsum_U[rows, None]  # these are log-probs now
            entropy_U[rows] = -torch.linalg.vecdot(scaled.exp(), scaled)
        picked_N = logits_UV[row_N, targets_N].float() / temperature_U[row_N]
        logprobs_N = picked_N - logsum_U[row_N]
        entropy_N = entropy_U[row_N]
        ctx.save_for_backward(logits_UV, row_N, targets_N, temperature_U, logsum_U)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """d logprob_n / d logits[u] = (onehot(target_n) - softmax(logits[u] / temperature)) / temperature,
        summed over the tokens n of row u."""
        logits_UV, row_N, targets_N, temperature_U, logsum_U = ctx.saved_tensors
        num_rows, vocab_size = logits_UV.shape
        scale_N = grads[0] / temperature_U[row_N]
        scale_U = torch.zeros_like(logsum_U).index_add_(0, row_N, scale_N)
        # Sort the tokens by their rows, so that the tokens of a chunk are neighbours.
        order_N = row_N.argsort(stable=True)
        row_N = row_N[order_N]
        targets_N = targets_N[order_N]
        scale_N = scale_N[order_N]
        chunks = _chunks(logits_UV)
        chunk_bounds = torch.tensor([*(rows.start for rows in chunks), num_rows], device=row_N.device)
        token_bounds = torch.searchsorted(row_N, chunk_bounds).tolist()
        for index, rows in enumerate(chunks):
            grad = logits_UV[rows].float()
            grad /= temperature_U[rows, None]
            grad -= logsum_U[rows, None]
            grad.exp_().mul_(-scale_U[rows, None])
            tokens = slice(token_bounds[index], token_bounds[index + 1])
            flat_places = (row_N[tokens] - rows.start) * vocab_size + targets_N[tokens]
            grad.view(-1).index_add_(0, flat_places, scale_N[tokens])
            logits_UV[rows] = grad
        return logits_UV, None, None, None


def _chunks(logits_UV: torch.Tensor) -> list[slice]:
    """Slices of rows of at most `CHUNK_BYTES` in float32 each, at least one row."""
    num_rows, vocab_size = logits_UV.shape
    chunk_rows = max(1, CHUNK_BYTES // (4 * vocab_size))
    return [slice(start, min(num_rows, start + chunk_rows)) for start in range(0, num_rows, chunk_rows)]
