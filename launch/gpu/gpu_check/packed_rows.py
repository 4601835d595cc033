"""Packed rows of chosen shapes, and attention over them by either implementation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from invrl.train.batches.micro_batch import TokenSequence
from invrl.train.batches.packing import pack
from invrl.train.layers.flex_attention import TreeMask
from invrl.train.layers.sdpa import AttentionCalls
from invrl.train.layers.sliding_window import windowed
from invrl.train.parallel.context_share import ContextShare

Attention = TreeMask | AttentionCalls

_ROWS_OF_A_GROUP = 8


def equal_rows(num_tokens: int, num_rows: int) -> ContextShare:
    """Rows without a common prefix."""
    rng = np.random.default_rng(0)
    return _packed(
        [rng.integers(0, 1000, num_tokens // num_rows) for _ in range(num_rows)]
    )


def prefix_trees(num_tokens: int, num_groups: int) -> ContextShare:
    """Groups of eight rows with one prompt. Half of the tokens are prompts. In each
    group two rows share the first half of their replies, too."""
    rng = np.random.default_rng(0)
    group_tokens = num_tokens // num_groups
    reply_tokens = group_tokens // 2 // _ROWS_OF_A_GROUP
    sequences: list[np.ndarray] = []
    for _ in range(num_groups):
        prompt_T = rng.integers(0, 1000, group_tokens // 2)
        replies = [rng.integers(0, 1000, reply_tokens) for _ in range(_ROWS_OF_A_GROUP)]
        replies[1][: reply_tokens // 2] = replies[0][: reply_tokens // 2]
        sequences += [np.concatenate([prompt_T, reply_T]) for reply_T in replies]
    return _packed(sequences)


def _packed(sequences: list[np.ndarray]) -> ContextShare:
    rows: list[TokenSequence] = []
    for tokens_T in sequences:
        last = np.array([len(tokens_T) - 1])
        rows.append(
            TokenSequence(
                tokens_T=tokens_T.astype(np.int32), wanted_N=last, temperature=1.0
            )
        )
    total = sum(map(len, sequences))
    (micro_batch,) = pack(rows, max_tokens=total, share_prefixes=True)
    return ContextShare.of(micro_batch, rank=0, ranks=1, multiple=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """Random queries, keys and values [1, heads, P, dim], and the gradient of the
    output."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gradient: torch.Tensor

    @staticmethod
    def random(
        num_tokens: int,
        *,
        heads: int,
        key_heads: int,
        dim: int,
        dtype: torch.dtype,
        target: torch.device,
    ) -> "AttentionInputs":
        generator = torch.Generator(device=target).manual_seed(1)

        def drawn(num_heads: int) -> torch.Tensor:
            shape = (1, num_heads, num_tokens, dim)
            return torch.randn(shape, generator=generator, device=target).to(dtype)

        return AttentionInputs(
            queries=drawn(heads),
            keys=drawn(key_heads),
            values=drawn(key_heads),
            gradient=drawn(heads),
        )

    def to(self, dtype: torch.dtype) -> "AttentionInputs":
        return AttentionInputs(
            queries=self.queries.to(dtype),
            keys=self.keys.to(dtype),
            values=self.values.to(dtype),
            gradient=self.gradient.to(dtype),
        )

    def forward(self, attention: Attention) -> torch.Tensor:
        scale = self.queries.shape[-1] ** -0.5
        return attention.attend(self.queries, self.keys, self.values, scale=scale)

    def forward_and_backward(self, attention: Attention) -> dict[str, torch.Tensor]:
        """The output, and the gradients of queries, keys and values."""
        leaves = {"queries": self.queries, "keys": self.keys, "values": self.values}
        leaves = {
            name: tensor.detach().requires_grad_() for name, tensor in leaves.items()
        }
        scale = self.queries.shape[-1] ** -0.5
        output = attention.attend(**leaves, scale=scale)
        gradients = torch.autograd.grad(output, list(leaves.values()), self.gradient)
        return {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}


def one_kernel(
    share: ContextShare, window: int | None, target: torch.device
) -> TreeMask:
    return TreeMask.of(share, window, target)


def calls_per_block(
    share: ContextShare, window: int | None, target: torch.device, dtype: torch.dtype
) -> AttentionCalls:
    blocks = share.micro_batch.blocks
    if window is not None:
        blocks = windowed(blocks, share.micro_batch.positions_P, window)
    return AttentionCalls.of(blocks, share.gathered_P, target, dtype)


def milliseconds(work: Callable[[], object], *, warm_up: int, rounds: int) -> float:
    """Of one call, on a GPU."""
    for _ in range(warm_up):
        work()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / rounds
