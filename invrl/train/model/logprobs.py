"""Log-probs and entropies of chosen tokens from hidden states: vocabulary projection
and softmax in one.

The logits of a micro-batch never exist as a whole, neither forward nor backward. The
vocabulary is processed in blocks: a block of logits is projected, added to each row's
running softmax, and discarded. The backward pass projects the block again. Some blocks
are kept for it, at most half of them and `KEPT_BYTES`, because projecting again is a
third more work. So memory does not grow with the vocabulary, apart from the weight and
its gradient.

A row of logits may predict several tokens, because rollouts that begin alike share it.
A token may have K candidates, whose log-probs are also wanted: they cost a lookup each,
in the same blocks. Axes: U rows of logits, N tokens, A all targets (the N tokens, then
their candidates, N + N K), V the vocabulary (or this rank's shard of it), H the hidden
size, M rows of logits under a grammar, W the tokens of one block.

On CUDA the gradient is not the same to the last bit each time, unless torch's
deterministic algorithms are on: the terms of tokens that share a row of logits are
added (`index_add_`) in an order that varies on a GPU. On CPU their order is fixed.

On CUDA the softmax of a block is one kernel, and so is its gradient (`device.fused`);
with a soft cap or a grammar each is the same chain of operations as on a CPU.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import ProcessGroup

from invrl.train.batches.micro_batch import MicroBatch
from invrl.train.model.running_softmax import RunningSoftmax
from invrl.train.runtime import device
from invrl.train.runtime.device import to_device
from invrl.train.runtime.logit_blocks import KEPT_BYTES
from invrl.types.top_logprobs import NO_TOKEN

_FLOOR = -1e30
"""Logit of a token that cannot be sampled, and the maximum of no logits. Its exp is 0,
and 0 times it is 0, unlike with infinity."""
_BLOCK_TOKENS = 512
"""Divisor of a block's number of tokens, apart from the last. Narrower matrices would
be multiplied slowly, and a GPU has fast kernels only for rows that begin at aligned
addresses: with an odd number of tokens an H100 took four times as long."""


def projected_logprobs(
    hidden_UH: torch.Tensor,
    weight_VH: torch.Tensor,
    micro_batch: MicroBatch,
    *,
    start: int = 0,
    group: ProcessGroup | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log-probs of the micro-batch's wanted tokens, and the entropies in nats of
    the distributions that they were drawn from, float32 [N] each; and the log-probs of
    their candidates [N, K], minus infinity where there is none. All have a gradient.
    None: the micro-batch has no candidates.

    The logits are hidden_UH @ weight_VH.T in the dtype of both; the rest is computed in
    float32 (in float64 for float64). `softcap` c makes a logit x into c * tanh(x / c).
    Then logits are divided by the row's temperature, and the tokens that a grammar
    excludes are removed: their probability and gradient are 0.

    Under tensor parallelism `weight_VH` is this rank's shard of the vocabulary, the
    tokens [start, start + V), and `group` are the ranks that hold the others. All of
    them call this with equal `hidden_UH` and get equal results. The gradient of
    `weight_VH` is whole; that of `hidden_UH` is this shard's part of a sum over the
    group, so the caller's `hidden_UH` must come from an operation whose backward pass
    adds these up.
    """
    num_tokens = len(micro_batch.targets_N)
    wanted = _Wanted.of(
        micro_batch, hidden_UH, start=start, vocab_size=len(weight_VH), softcap=softcap
    )
    logprobs_A, entropy_N = cast(
        tuple[torch.Tensor, torch.Tensor],
        _ProjectedLogprobs.apply(hidden_UH, weight_VH, wanted, group),
    )
    candidates_NK = micro_batch.candidates_NK
    if candidates_NK is None:
        return logprobs_A, entropy_N, None
    is_none_NK = to_device(candidates_NK == NO_TOKEN, logprobs_A.device)
    top_NK = (
        logprobs_A[num_tokens:]
        .view(candidates_NK.shape)
        .masked_fill(is_none_NK, -torch.inf)
    )
    return logprobs_A[:num_tokens].clone(), entropy_N, top_NK


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wanted:
    """Targets of the logits, on their device. S are those of the A whose target is in
    this shard, ascending by target."""

    temperature_U: torch.Tensor
    row_A: torch.Tensor
    """Row of logits that predicts each of them."""
    num_tokens: int
    place_S: torch.Tensor
    """Indices among the A."""
    row_S: torch.Tensor
    target_S: torch.Tensor
    """Targets, as indices into the shard."""
    restricted_M: torch.Tensor
    allowed_MW: torch.Tensor
    start: int
    softcap: float | None
    is_fused: bool
    """Whether a block is read once per pass. Logits are then only divided by their
    temperatures."""
    blocks: tuple["_Block", ...]
    equal_S: torch.Tensor
    """Number of each target's place in the logits: equal where tokens share a row and
    are the same."""
    num_kept: int
    """Number of first blocks whose logits are kept for the backward pass."""

    @staticmethod
    def of(
        micro_batch: MicroBatch,
        hidden_UH: torch.Tensor,
        *,
        start: int,
        vocab_size: int,
        softcap: float | None,
    ) -> "_Wanted":
        target = hidden_UH.device
        row_N = micro_batch.projection_N
        candidates_NK = micro_batch.candidates_NK
        row_A = row_N
        targets_A = micro_batch.targets_N
        if candidates_NK is not None:
            row_A = np.concatenate([row_N, row_N.repeat(candidates_NK.shape[1])])
            targets_A = np.concatenate([targets_A, candidates_NK.reshape(-1)])
        targets_A = targets_A - start  # NO_TOKEN is below every shard
        order_A = targets_A.argsort(kind="stable")
        first, last = targets_A[order_A].searchsorted((0, vocab_size)).tolist()
        place_S = order_A[first:last]
        places = targets_A[place_S] * max(1, len(hidden_UH)) + row_A[place_S]
        equal_S = np.unique(places, return_inverse=True)[1]
        num_rows = max(1, len(hidden_UH))
        width = _BLOCK_TOKENS * max(
            1, device.logit_block_bytes() // (4 * num_rows * _BLOCK_TOKENS)
        )
        bounds = [*range(0, vocab_size, width), vocab_size]
        token_bounds = targets_A[place_S].searchsorted(bounds).tolist()
        blocks: list[_Block] = []
        for index in range(len(bounds) - 1):
            vocabulary = slice(bounds[index], bounds[index + 1])
            blocks.append(
                _Block(vocabulary, slice(token_bounds[index], token_bounds[index + 1]))
            )
        is_plain = softcap is None and len(micro_batch.restricted_M) == 0
        is_fused = device.fuses() and is_plain and len(hidden_UH) > 0
        return _Wanted(
            temperature_U=to_device(micro_batch.temperature_U, target).to(
                _work_dtype(hidden_UH)
            ),
            row_A=to_device(row_A, target),
            num_tokens=len(row_N),
            place_S=to_device(place_S, target),
            row_S=to_device(row_A[place_S], target),
            target_S=to_device(targets_A[place_S], target),
            restricted_M=to_device(micro_batch.restricted_M, target),
            allowed_MW=to_device(micro_batch.allowed_MW, target),
            start=start,
            softcap=softcap,
            is_fused=is_fused,
            blocks=tuple(blocks),
            equal_S=to_device(equal_S, target),
            num_kept=min(
                len(blocks) // 2, KEPT_BYTES // (hidden_UH.itemsize * num_rows * width)
            ),
        )

    def places(self, block: "_Block") -> tuple[torch.Tensor, torch.Tensor]:
        """Return row and column, in the block's logits, of each target in the block."""
        return self.row_S[block.tokens], self.target_S[
            block.tokens
        ] - block.vocabulary.start

    def capped(self, projected_UW: torch.Tensor, *, is_kept: bool) -> torch.Tensor:
        """Return a block's logits after the soft cap, which may be overwritten: a copy
        if the block is kept."""
        logits_UW = projected_UW.to(self.temperature_U.dtype, copy=is_kept)
        if self.softcap is not None:
            logits_UW.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_UW

    def scale_and_restrict(self, logits_UW: torch.Tensor, block: "_Block") -> None:
        """Apply temperature and grammar in place."""
        logits_UW.div_(self.temperature_U[:, None])
        if len(self.restricted_M) == 0:
            return
        first = self.start + block.vocabulary.start
        token_W = torch.arange(
            first, first + logits_UW.shape[1], device=logits_UW.device
        )
        bytes_MW = self.allowed_MW[:, token_W // 8]
        is_allowed_MW = (
            bytes_MW.bitwise_right_shift((token_W % 8).to(torch.uint8))
            .bitwise_and(1)
            .bool()
        )
        logits_UW[self.restricted_M] = logits_UW[self.restricted_M].masked_fill(
            ~is_allowed_MW, _FLOOR
        )


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens of the shard that are projected together, and which of the S targets are
    among them."""

    vocabulary: slice
    tokens: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slopes:
    """Inputs of the gradient of a row's logits, in addition to the logits: [U] each."""

    logsum_U: torch.Tensor
    entropy_U: torch.Tensor
    scale_U: torch.Tensor
    """Sum of the gradients of the row's log-probs, over the temperature."""
    entropy_scale_U: torch.Tensor | None
    """The same of its entropies. None: they have no gradient."""


class _ProjectedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: torch.Tensor,
        weight_VH: torch.Tensor,
        wanted: _Wanted,
        group: ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        zeros_U = torch.zeros_like(wanted.temperature_U)
        softmax = RunningSoftmax(
            max_U=zeros_U + _FLOOR, exp_U=zeros_U, weighted_U=zeros_U
        )
        picked_A = zeros_U.new_zeros(len(wanted.row_A))
        num_kept = wanted.num_kept if any(ctx.needs_input_grad) else 0
        kept: list[torch.Tensor] = []
        for index, block in enumerate(wanted.blocks):
            projected_UW = _project(hidden_UH, weight_VH, block)
            if index < num_kept:
                kept.append(projected_UW)
            row_S, column_S = wanted.places(block)
            if wanted.is_fused:
                picked_S = (
                    projected_UW[row_S, column_S].to(zeros_U.dtype)
                    / wanted.temperature_U[row_S]
                )
                softmax.merge(
                    RunningSoftmax(*_statistics(projected_UW, wanted.temperature_U))
                )
            else:
                logits_UW = wanted.capped(projected_UW, is_kept=index < num_kept)
                wanted.scale_and_restrict(logits_UW, block)
                picked_S = logits_UW[row_S, column_S]
                softmax.add(logits_UW)
            picked_A[wanted.place_S[block.tokens]] = picked_S
        if group is not None:
            picked_A = softmax.reduce(picked_A, group)
        logsum_U = softmax.logsum()
        logprobs_A = picked_A - logsum_U[wanted.row_A]
        entropy_U = softmax.entropy()
        ctx.save_for_backward(hidden_UH, weight_VH, logsum_U, entropy_U, *kept)
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)  # most losses use the log-probs alone
        return logprobs_A, entropy_U[wanted.row_A[: wanted.num_tokens]]

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        """Return the sum over the targets n of row u, with z = logits / temperature and
        p = softmax(z[u]):

        d logprob_n / d z[u] = onehot(target_n) - p d entropy_n / d z[u] = -p (log p +
        entropy_n)
        """
        hidden_UH, weight_VH, logsum_U, entropy_U, *kept = ctx.saved_tensors
        wanted: _Wanted = ctx.wanted
        zeros_U = torch.zeros_like(logsum_U)
        logprob_grad_A, entropy_grad_N = grads
        if logprob_grad_A is None:
            logprob_grad_A = zeros_U.new_zeros(len(wanted.row_A))
        scale_A = logprob_grad_A / wanted.temperature_U[wanted.row_A]
        scale_U = zeros_U.index_add(0, wanted.row_A, scale_A)
        entropy_scale_U = None
        if entropy_grad_N is not None:
            row_N = wanted.row_A[: wanted.num_tokens]
            entropy_scale_N = entropy_grad_N / wanted.temperature_U[row_N]
            entropy_scale_U = zeros_U.index_add(0, row_N, entropy_scale_N)
        scale_S = scale_A[wanted.place_S]
        slopes = _Slopes(
            logsum_U=logsum_U,
            entropy_U=entropy_U,
            scale_U=scale_U,
            entropy_scale_U=entropy_scale_U,
        )
        hidden_grad_UH = torch.zeros(
            hidden_UH.shape, dtype=logsum_U.dtype, device=logsum_U.device
        )
        weight_grad_VH = None  # as long as the weight is frozen
        if ctx.needs_input_grad[1]:
            weight_grad_VH = torch.empty_like(weight_VH)
        for index, block in enumerate(wanted.blocks):
            is_kept = index < len(kept)
            projected_UW = (
                kept[index] if is_kept else _project(hidden_UH, weight_VH, block)
            )
            if wanted.is_fused:
                grad_UW = _fused_gradient(projected_UW, slopes, scale_S, wanted, block)
            else:
                grad_UW = _gradient(
                    projected_UW, slopes, scale_S, wanted, block, is_kept=is_kept
                )
            _add_product(hidden_grad_UH, grad_UW, weight_VH[block.vocabulary])
            if weight_grad_VH is not None:
                torch.mm(grad_UW.T, hidden_UH, out=weight_grad_VH[block.vocabulary])
        return hidden_grad_UH.to(hidden_UH.dtype), weight_grad_VH, None, None


def _gradient(
    projected_UW: torch.Tensor,
    slopes: _Slopes,
    scale_S: torch.Tensor,
    wanted: _Wanted,
    block: _Block,
    *,
    is_kept: bool,
) -> torch.Tensor:
    """Return the gradient of a block of projected logits, in their dtype. `scale_S` is
    that of each target's log-prob, over the temperature."""
    logits_UW = wanted.capped(projected_UW, is_kept=is_kept)
    slope_UW = None
    if wanted.softcap is not None:  # of c * tanh(x / c): 1 - tanh^2
        slope_UW = 1 - (logits_UW / wanted.softcap).square()
    wanted.scale_and_restrict(logits_UW, block)
    log_p_UW = logits_UW.sub_(slopes.logsum_U[:, None])
    if slopes.entropy_scale_U is None:
        grad_UW = log_p_UW.exp_().mul_(-slopes.scale_U[:, None])
    else:
        p_UW = log_p_UW.exp()
        of_entropy_UW = log_p_UW.add_(slopes.entropy_U[:, None]).mul_(
            slopes.entropy_scale_U[:, None]
        )
        grad_UW = p_UW.mul_(of_entropy_UW.add_(slopes.scale_U[:, None]).neg_())
    row_S, column_S = wanted.places(block)
    flat_places_S = row_S * grad_UW.shape[1] + column_S
    grad_UW.view(-1).index_add_(0, flat_places_S, scale_S[block.tokens])
    if slope_UW is not None:
        grad_UW.mul_(slope_UW)
    return grad_UW.to(projected_UW.dtype)


def _fused_gradient(
    projected_UW: torch.Tensor,
    slopes: _Slopes,
    scale_S: torch.Tensor,
    wanted: _Wanted,
    block: _Block,
) -> torch.Tensor:
    """Return the gradient like `_gradient`, where `wanted.is_fused`: of all logits as
    if none were a target, then again of the targets. So all are rounded once."""
    temperature_U = wanted.temperature_U
    grad_UW = _gradient_without_targets(
        projected_UW,
        temperature_U,
        slopes.logsum_U,
        slopes.entropy_U,
        slopes.scale_U,
        slopes.entropy_scale_U,
    )
    row_S, column_S = wanted.places(block)
    equal_S = wanted.equal_S[block.tokens]
    scale_of_place_S = torch.zeros_like(scale_S).index_add(
        0, equal_S, scale_S[block.tokens]
    )[equal_S]
    entropy_scale_S = (
        None if slopes.entropy_scale_U is None else slopes.entropy_scale_U[row_S]
    )
    other_S = _slope(
        projected_UW[row_S, column_S],
        temperature_U[row_S],
        slopes.logsum_U[row_S],
        slopes.entropy_U[row_S],
        slopes.scale_U[row_S],
        entropy_scale_S,
    )
    grad_UW[row_S, column_S] = (other_S + scale_of_place_S).to(grad_UW.dtype)
    return grad_UW


@device.fused
def _statistics(
    projected_UW: torch.Tensor, temperature_U: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of `RunningSoftmax` [U] of a block."""
    logits_UW = projected_UW.to(temperature_U.dtype) / temperature_U[:, None]
    max_U = logits_UW.amax(dim=1)
    fall_UW = logits_UW - max_U[:, None]
    exp_UW = fall_UW.exp()
    return max_U, exp_UW.sum(dim=1), (exp_UW * fall_UW).sum(dim=1)


@device.fused
def _gradient_without_targets(
    projected_UW: torch.Tensor,
    temperature_U: torch.Tensor,
    logsum_U: torch.Tensor,
    entropy_U: torch.Tensor,
    scale_U: torch.Tensor,
    entropy_scale_U: torch.Tensor | None,
) -> torch.Tensor:
    slope_UW = _slope(
        projected_UW,
        temperature_U[:, None],
        logsum_U[:, None],
        entropy_U[:, None],
        scale_U[:, None],
        None if entropy_scale_U is None else entropy_scale_U[:, None],
    )
    return slope_UW.to(projected_UW.dtype)


def _slope(
    projected: torch.Tensor,
    temperature: torch.Tensor,
    logsum: torch.Tensor,
    entropy: torch.Tensor,
    scale: torch.Tensor,
    entropy_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of logits that are no target. The shapes broadcast."""
    log_p = projected.to(temperature.dtype) / temperature - logsum
    factor = scale
    if entropy_scale is not None:
        factor = factor + entropy_scale * (log_p + entropy)
    return -log_p.exp() * factor


def _project(
    hidden_UH: torch.Tensor, weight_VH: torch.Tensor, block: _Block
) -> torch.Tensor:
    """Return the block's logits [U, W], in the dtype of the model."""
    return torch.mm(hidden_UH, weight_VH[block.vocabulary].T)


def _add_product(
    sum_UH: torch.Tensor, grad_UW: torch.Tensor, weight_WH: torch.Tensor
) -> None:
    """Add grad @ weight in the dtype of the sum, which may be wider."""
    if sum_UH.dtype == grad_UW.dtype:
        sum_UH.addmm_(grad_UW, weight_WH)
    else:
        sum_UH += torch.mm(grad_UW, weight_WH)


def _work_dtype(hidden_UH: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden_UH.dtype, torch.float32)
