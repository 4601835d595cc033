"""Samples and denominators for losses of a few tokens."""

from __future__ import annotations

import torch

from invrl.algorithms.loss_inputs import Denominators, Samples


def one_row(num_tokens: int) -> Samples:
    """All tokens are of one row."""
    return Samples.each_a_rollout(torch.zeros(num_tokens, dtype=torch.int64))


def tokens_alone(num_tokens: float) -> Denominators:
    """Of a mini-batch with one row of so many tokens."""
    return Denominators(tokens=num_tokens, samples=1.0, rollouts=1.0, groups=1.0)
