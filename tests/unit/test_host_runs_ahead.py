"""The host gives a GPU all micro-batches of a mini-batch without waiting for one of
them: nothing on their way reads a number. A tensor on torch's meta device has none, and
raises where one is read."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, token_metrics
from invrl.algorithms.objectives.example import example_inputs, with_sample_numbers
from invrl.algorithms.objectives.objectives import check_outputs, load_objective
from invrl.algorithms.policy_loss.value_loss import value_loss
from invrl.contrib.lambda_grpo import LengthWeight
from invrl.train.model.nonfinite_steps import nonfinite
from invrl.types.metrics import Max, Mean, Sum

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kl": {"kl": {"coefficient": 0.05}},
    "entropy": {"entropy": {"coefficient": 0.01}},
    "sequences": {"ratio_level": "sequence", "aggregation": "sequence_mean"},
    "lengths": {"sample_weight": "invrl.contrib.lambda_grpo:LengthWeight"},
    "rejection": {"rejection": {"kind": "token"}},
    "sft": {"objective": "sft"},
}


def without_numbers(value: Any) -> Any:
    """The same on the meta device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta").requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: without_numbers(part) for name, part in value.items()}
    return value


def inputs_without_numbers() -> LossInputs:
    inputs = with_sample_numbers(example_inputs(), LengthWeight())
    rows = inputs.samples
    members = {
        field.name: without_numbers(getattr(inputs, field.name))
        for field in fields(inputs)
    }
    members["samples"] = replace(
        rows,
        **{
            field.name: without_numbers(getattr(rows, field.name))
            for field in fields(rows)
        },
    )
    return replace(inputs, **members)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_computing_an_objective_does_not_wait_for_the_gpu(
    settings: dict[str, Any],
) -> None:
    outputs = load_objective(AlgorithmConfig.model_validate(settings))(
        inputs_without_numbers()
    )
    check_outputs("rl", outputs)
    outputs.loss.backward()
    assert "loss" in list(outputs.metrics)
    with pytest.raises((RuntimeError, NotImplementedError)):
        outputs.metrics["loss"].value()


def test_computing_the_value_loss_does_not_wait_for_the_gpu() -> None:
    values_N = torch.zeros(3, device="meta", requires_grad=True)
    old_N = torch.zeros(3, device="meta")
    value_loss(values_N, old_N, old_N, clip=0.2, tokens=3.0).loss.backward()


def test_deferred_metrics_have_the_values_of_their_tensors() -> None:
    metrics = token_metrics(
        {
            "mean": torch.tensor([1.0, 2.0]),
            "of_one": torch.tensor([5.0]),
            "of_none": torch.empty(0),
        },
        {"most": torch.tensor([0.5, 3.0]), "most_of_none": torch.empty(0)},
        {"sum": torch.tensor([1.0, -4.0])},
    )
    assert dict(metrics) == {
        "mean": Mean(3.0, 2),
        "of_one": Mean(5.0, 1),
        "of_none": Mean(0.0, 0),
        "most": Max(3.0),
        "most_of_none": Max(0.0),
        "sum": Sum(-3.0),
    }
    assert len(metrics) == 6


def test_losses_that_are_not_finite_are_found() -> None:
    losses = [torch.tensor(value) for value in (1.0, math.inf, -2.0, math.nan)]
    infinite, undefined = nonfinite([*losses, torch.tensor(-1.0, dtype=torch.float64)])
    assert infinite == math.inf
    assert math.isnan(undefined)
    assert nonfinite(losses[:1]) == []
    assert nonfinite([]) == []
