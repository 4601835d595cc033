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


@given(
    tokens=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=20),
    clip=st.sampled_from([0.0, 0.1, 0.2, 1.0]),
)
def test_clipped_value_loss_is_the_larger_of_two_squares(
    tokens: list[tuple[float, float, float]], clip: float
) -> None:
    values_N, old_N, returns_N = (
        torch.tensor(column).double() for column in zip(*tokens, strict=True)
    )
    losses_N = value_losses(values_N, old_N, returns_N, clip)
    for loss, (value, old, target) in zip(losses_N.tolist(), tokens, strict=True):
        expected = 0.5 * (value - target) ** 2
        if clip:
            near_old = min(max(value, old - clip), old + clip)
            expected = max(expected, 0.5 * (near_old - target) ** 2)
        assert loss == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_value_beyond_the_clip_has_no_gradient() -> None:
    """Towards its return. Away from it, the plain square is larger and pulls it
    back."""
    values_N = torch.tensor([0.5, 0.5, 0.1], dtype=torch.float64, requires_grad=True)
    outputs = value_loss(
        values_N,
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
        clip=0.2,
        tokens=6,
    )
    outputs.loss.backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == pytest.approx([0.0, 1.5 / 6, -0.9 / 6])
    assert float(outputs.loss.detach()) == pytest.approx(
        (0.8**2 + 1.5**2 + 0.9**2) / 2 / 6
    )
    metrics = resolve(outputs.metrics)
    assert metrics["value_clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["value_mean"] == pytest.approx(1.1 / 3)


def test_value_loss_without_a_clip_has_the_gradient_of_a_square() -> None:
    rng = np.random.default_rng(0)
    values_N = torch.from_numpy(rng.normal(size=8)).requires_grad_()
    returns_N = torch.from_numpy(rng.normal(size=8))
    value_loss(values_N, torch.zeros(8), returns_N, clip=0.0, tokens=8).loss.backward()
    assert values_N.grad is not None
    assert torch.allclose(values_N.grad, (values_N - returns_N).detach() / 8)
