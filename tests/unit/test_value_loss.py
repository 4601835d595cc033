"""The critic's loss against float64 arithmetic token by token, and where its clip stops
a value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from invrl.algorithms.policy_loss.value_loss import value_loss, value_losses
from invrl.types.metrics import resolve

NUMBERS = st.floats(-5, 5, allow_nan=False, width=32)
TOKENS = st.tuples(NUMBERS, NUMBERS, NUMBERS)
"""A value, the value at sampling, and the return."""


def loss_of_token(
    value: float,
    old_value: float,
    target: float,
    clip: float,
) -> float:
    loss = 0.5 * (value - target) ** 2
    if not clip:
        return loss
    least = old_value - clip
    most = old_value + clip
    clipped = min(max(value, least), most)
    return max(loss, 0.5 * (clipped - target) ** 2)


@given(
    tokens=st.lists(TOKENS, min_size=1, max_size=20),
    clip=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
)
def test_clipped_value_loss_is_the_larger_of_two_squares(
    tokens: list[tuple[float, float, float]],
    clip: float,
) -> None:
    table = torch.tensor(tokens).double()
    values_N, old_N, returns_N = table.unbind(1)
    losses_N = value_losses(values_N, old_N, returns_N, clip)
    expected = [loss_of_token(*token, clip) for token in tokens]
    assert losses_N.tolist() == pytest.approx(
        expected,
        rel=1e-12,
        abs=1e-12,
    )


def test_value_beyond_the_clip_has_no_gradient() -> None:
    """Towards its return. Away from it, the plain square is larger and pulls it
    back."""
    values_N = torch.tensor(
        [0.5, 0.5, 0.1],
        dtype=torch.float64,
        requires_grad=True,
    )
    outputs = value_loss(
        values_N,
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
        clip=0.2,
        tokens=6,
    )
    outputs.loss.backward()
    assert values_N.grad is not None
    gradients = values_N.grad.tolist()
    assert gradients == pytest.approx([0.0, 1.5 / 6, -0.9 / 6])
    squares = 0.8**2 + 1.5**2 + 0.9**2
    loss = outputs.loss.item()
    assert loss == pytest.approx(squares / 2 / 6)
    metrics = resolve(outputs.metrics)
    assert metrics["value_clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["value_mean"] == pytest.approx(1.1 / 3)


def test_value_loss_without_a_clip_has_the_gradient_of_a_square() -> None:
    rng = np.random.default_rng(0)
    values_N = torch.from_numpy(rng.normal(size=8))
    values_N.requires_grad_()
    returns_N = torch.from_numpy(rng.normal(size=8))
    outputs = value_loss(
        values_N,
        torch.zeros(8),
        returns_N,
        clip=0.0,
        tokens=8,
    )
    outputs.loss.backward()
    assert values_N.grad is not None
    errors_N = (values_N - returns_N).detach()
    assert torch.allclose(values_N.grad, errors_N / 8)
