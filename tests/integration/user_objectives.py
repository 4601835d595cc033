"""Objectives as a user writes them, for trainer ranks to import."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.objectives.objectives import Needs
from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.types.metrics import Sum


class Everything:
    """Reads all that an objective can read. With d the gap to the reference, s a row's
    sum of log-probs and m the mean of s in the row's group:

    L = 1/rollouts sum_rows score mean_t(weight d^2) + 1/groups sum_rows (s - m)^2 / 2
        - 0.3/tokens sum_t weight entropy
    """

    needs = Needs(old=True, reference=True, sample_table=True)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.reference_N is not None
        assert inputs.entropy_N is not None
        rows = inputs.samples
        denominators = inputs.denominators
        weight_N = inputs.columns["weight"]
        gap_N = inputs.current_N - inputs.reference_N
        per_row_R = inputs.numbers["score"] * rows.mean(weight_N * gap_N.square())
        coupled_R = inputs.numbers["slope"] * rows.sum(inputs.current_N)
        loss = (
            per_row_R.sum() / denominators.rollouts
            + coupled_R.sum() / denominators.groups
            - 0.3 * (weight_N * inputs.entropy_N).sum() / denominators.tokens
        )
        return LossOutputs(
            loss=loss, metrics={"scores": Sum(float(inputs.numbers["score"].sum()))}
        )

    def couple(self, table: SampleTable) -> Mapping[str, NDArray[np.float64]]:
        groups = np.array(table.group_ids)
        mean_of = {
            group: table.current_M[groups == group].mean() for group in table.group_ids
        }
        return {
            "slope": table.current_M
            - np.array([mean_of[group] for group in table.group_ids])
        }


class OneNameTwice(Everything):
    def couple(self, table: SampleTable) -> Mapping[str, NDArray[np.float64]]:
        return {**super().couple(table), "score": table.current_M}


everything = Everything()
one_name_twice = OneNameTwice()


def of_wrong_shape(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.current_N, metrics={})


def without_gradient(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=torch.tensor(1.0), metrics={})


def a_number(inputs: LossInputs) -> float:
    return 1.0
