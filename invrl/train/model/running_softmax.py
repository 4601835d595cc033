"""Softmax of rows whose logits come block by block, and from several ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce


@dataclass(slots=True, eq=False)
class RunningSoftmax:
    """Softmax of each row over the blocks seen so far, float32 [U] each. Sums are
    relative to the row's maximum, which keeps them exact for large logits."""

    max_U: torch.Tensor
    exp_U: torch.Tensor
    """Sum of exp(logit - max)."""
    weighted_U: torch.Tensor
    """Sum of exp(logit - max) (logit - max)."""

    def add(self, logits_UW: torch.Tensor) -> None:
        """Add a block of logits."""
        # One fused kernel. The largest probability is 1 / sum of exp(logit - max).
        probability_UW = logits_UW.softmax(dim=1)
        max_U = logits_UW.amax(dim=1)
        exp_U = probability_UW.amax(dim=1).reciprocal()
        mean_U = torch.linalg.vecdot(probability_UW, logits_UW)
        self.merge(
            RunningSoftmax(
                max_U=max_U, exp_U=exp_U, weighted_U=exp_U * (mean_U - max_U)
            )
        )

    def merge(self, block: RunningSoftmax) -> None:
        """Add the softmax of other logits, which is then relative to this one's
        maximum."""
        highest_U = torch.maximum(self.max_U, block.max_U)
        self.count_from(highest_U)
        block.count_from(highest_U)
        self.exp_U = self.exp_U + block.exp_U
        self.weighted_U = self.weighted_U + block.weighted_U

    def count_from(self, max_U: torch.Tensor) -> None:
        """Make the sums relative to another maximum, at least as large."""
        fall_U = self.max_U - max_U
        factor_U = fall_U.exp()
        self.weighted_U = factor_U * (self.weighted_U + self.exp_U * fall_U)
        self.exp_U = factor_U * self.exp_U
        self.max_U = max_U

    def reduce(self, picked_A: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Reduce to the softmax over the shards of all ranks, and return the picked
        logits, each from the rank that has it (on the others it is 0)."""
        max_U = self.max_U.clone()
        all_reduce(max_U, ReduceOp.MAX, group)
        self.count_from(max_U)
        parts = (self.exp_U, self.weighted_U, picked_A)
        summed = torch.cat(parts)
        all_reduce(summed, ReduceOp.SUM, group)
        self.exp_U, self.weighted_U, picked_A = summed.split(
            [len(part) for part in parts]
        )
        return picked_A

    def logsum(self) -> torch.Tensor:
        """Return the log of the sum of exp(logit)."""
        return self.max_U + self.exp_U.log()

    def entropy(self) -> torch.Tensor:
        return self.exp_U.log() - self.weighted_U / self.exp_U
