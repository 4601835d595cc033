"""Rows and denominators for losses of a few tokens."""

from __future__ import annotations

import torch

from invrl.algorithms.loss_inputs import Denominators, Rows


def one_row(num_tokens: int) -> Rows:
    """All tokens are of one row."""
    return Rows.each_a_rollout(torch.zeros(num_tokens, dtype=torch.int64))


def tokens_alone(num_tokens: float) -> Denominators:
    """Of a mini-batch with one row of so many tokens."""
    return Denominators(tokens=num_tokens, rows=1.0, rollouts=1.0, groups=1.0)
