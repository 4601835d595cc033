"""The distillation objective against the reverse KL itself: summed over a whole small
vocabulary; and token by token, written out in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_samples import one_row, tokens_alone

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.objectives.objectives import (
    Needs,
    load_objective,
    objective_needs,
)
from invrl.algorithms.tables import KlConfig
from invrl.errors import TrainError
from invrl.types.metrics import resolve


def outputs_of(
    current_N: torch.Tensor,
    teacher_N: torch.Tensor | None,
    config: AlgorithmConfig,
    *,
    old_N: torch.Tensor | None = None,
    rollout_N: torch.Tensor | None = None,
) -> LossOutputs:
    return load_objective(config)(
        LossInputs(
            current_N=current_N,
            entropy_N=None,
            samples=one_row(len(current_N)),
            denominators=tokens_alone(len(current_N)),
            old_N=old_N,
            rollout_N=current_N.detach() if rollout_N is None else rollout_N,
            advantages_N=torch.full(
                (len(current_N),), math.nan
            ),  # rewards are not read
            reference_N=None,
            columns={} if teacher_N is None else {"teacher": teacher_N},
        )
    )


@pytest.mark.parametrize("seed", range(5))
def test_expected_distillation_gradient_is_that_of_the_reverse_kl(seed: int) -> None:
    """Each token of a vocabulary once, weighted by its probability under the
    student."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(7, generator=generator).requires_grad_()
    teacher_V = torch.randn(7, generator=generator).log_softmax(0)
    config = AlgorithmConfig(objective="distillation", correction="none")
    expected = torch.zeros(7, dtype=torch.float64)
    for token in range(7):
        current_V = logits_V.log_softmax(0)
        outputs = outputs_of(
            current_V[token : token + 1], teacher_V[token : token + 1], config
        )
        [gradient_V] = torch.autograd.grad(outputs.loss, logits_V)
        expected += current_V[token].exp().item() * gradient_V.double()
    exact_V = logits_V.detach().double().requires_grad_()
    logprobs_V = exact_V.log_softmax(0)
    (logprobs_V.exp() * (logprobs_V - teacher_V.double())).sum().backward()
    assert exact_V.grad is not None
    assert expected.numpy() == pytest.approx(exact_V.grad.numpy(), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 8),
    has_old=st.booleans(),
    old_logprobs=st.sampled_from(["recompute", "engine"]),
    correction=st.sampled_from(["none", "truncated"]),
)
def test_distillation_advantage_is_the_gap_of_each_token(
    seed: int, length: int, has_old: bool, old_logprobs: str, correction: str
) -> None:
    rng = np.random.default_rng(seed)

    def column(center: np.ndarray | float, spread: float) -> torch.Tensor:
        return torch.from_numpy(
            (center + rng.normal(0, spread, length)).astype(np.float32)
        )

    current = column(-2.0, 1.0)
    old = column(current.numpy(), 0.3)
    rollout = column(old.numpy(), 0.3)
    teacher = column(-2.0, 1.0)
    config = AlgorithmConfig(
        objective="distillation", old_logprobs=old_logprobs, correction=correction
    )
    current_N = current.clone().requires_grad_()
    outputs = outputs_of(
        current_N, teacher, config, old_N=old if has_old else None, rollout_N=rollout
    )
    outputs.loss.backward()
    before = old if has_old else current
    if old_logprobs == "engine":
        before = rollout
    loss = 0.0
    gradient = []
    for token in range(length):
        new = current[token].item()
        at = before[token].item()
        engine = rollout[token].item()
        advantage = teacher[token].item() - at
        weight = min(math.exp(at - engine), 2.0) if correction == "truncated" else 1.0
        ratio = math.exp(new - at)
        clipped = min(max(ratio, 0.8), 1.2)
        surrogate = min(ratio * advantage, clipped * advantage)
        acts = ratio * advantage > clipped * advantage
        if advantage < 0 and ratio > 3:
            surrogate = 3 * advantage
            acts = True
        loss -= weight * surrogate / length
        gradient.append(0.0 if acts else -weight * ratio * advantage / length)
    assert outputs.loss.item() == pytest.approx(loss, rel=1e-4, abs=1e-5)
    assert current_N.grad is not None
    assert current_N.grad.numpy() == pytest.approx(
        np.array(gradient), rel=1e-4, abs=1e-5
    )
    gaps = [before[token].item() - teacher[token].item() for token in range(length)]
    assert resolve(outputs.metrics)["reverse_kl"] == pytest.approx(
        sum(gaps) / length, rel=1e-4, abs=1e-5
    )


def test_student_equal_to_its_teacher_has_no_gradient() -> None:
    current_N = torch.tensor([-1.0, -3.0]).requires_grad_()
    outputs = outputs_of(
        current_N, current_N.detach().clone(), AlgorithmConfig(objective="distillation")
    )
    outputs.loss.backward()
    assert current_N.grad is not None
    assert not current_N.grad.any()


def test_rows_without_a_teacher_column_are_refused() -> None:
    current_N = torch.tensor([-1.0]).requires_grad_()
    with pytest.raises(TrainError, match="column 'teacher'"):
        outputs_of(current_N, None, AlgorithmConfig(objective="distillation"))


def test_distillation_needs_old_and_teacher_logprobs() -> None:
    config = AlgorithmConfig(objective="distillation")
    assert objective_needs(config) == Needs(old=True, teacher=True)
    with_kl = config.model_copy(
        update={"kl": KlConfig(coefficient=0.1), "old_logprobs": "engine"}
    )
    assert objective_needs(with_kl) == Needs(reference=True, teacher=True)
