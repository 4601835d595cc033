"""A-3PO's interpolated old policy. `test_algorithms_loss_axes.py` compares its losses
with float64."""

from __future__ import annotations

import pytest
import torch
from loss_samples import tokens_alone

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, Samples
from invrl.algorithms.objectives.objectives import objective_needs
from invrl.algorithms.policy_loss.old_policy import old_logprobs

A3PO = AlgorithmConfig(old_logprobs="invrl.contrib.a3po:Interpolated")


def test_only_the_interpolated_policy_reads_the_age_of_tokens() -> None:
    assert objective_needs(A3PO).staleness
    assert not objective_needs(A3PO).old
    assert not objective_needs(AlgorithmConfig()).staleness


@pytest.mark.parametrize(
    ("staleness", "old"),
    [
        (0.0, "current"),
        (1.0, "rollout"),
        (2.0, "half"),
        (4.0, "quarter"),
    ],
)
def test_interpolated_policy_approaches_the_current_policy_with_age(
    staleness: float, old: str
) -> None:
    expected = {"current": -1.0, "rollout": -3.0, "half": -2.0, "quarter": -1.5}[old]
    current_N = torch.tensor([-1.0], requires_grad=True)
    row = Samples.each_a_rollout(torch.tensor([0]))
    inputs = LossInputs(
        current_N=current_N,
        entropy_N=None,
        samples=row,
        denominators=tokens_alone(1.0),
        old_N=None,
        rollout_N=torch.tensor([-3.0]),
        advantages_N=torch.tensor([1.0]),
        reference_N=None,
        columns={"staleness": torch.tensor([staleness])},
    )
    mixed_N = old_logprobs(inputs, A3PO)
    assert mixed_N.tolist() == [expected]
    assert not mixed_N.requires_grad
