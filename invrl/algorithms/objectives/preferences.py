"""Objectives from preferences: dpo, ipo, simpo and orpo on pairs, kto on single
samples.

A pair is the two samples of one group: the number `chosen` is 1.0 in one of them and
0.0 in the other. A sample of kto has the number `desirable`, 1.0 or 0.0. `couple` sees
all samples of the mini-batch, on all ranks, and gives each sample the slope of the
mini-batch's loss with respect to its sum of log-probs. The loss of a sample is then

    L_sample + slope (s - s')        s' = s without its gradient

so its value, and its gradient at the current weights, are exactly the paper's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, token_metrics
from invrl.algorithms.objectives import preference_losses
from invrl.algorithms.objectives.mismatched_samples import MISMATCHED
from invrl.algorithms.objectives.preference_losses import (
    PAIR_LOSSES,
    PairLosses,
    SampleSums,
)
from invrl.algorithms.objectives.sample_table import SampleTable
from invrl.errors import TrainError
from invrl.types.section import Section

CHOSEN = "chosen"
DESIRABLE = "desirable"


@dataclass(frozen=True, slots=True)
class PairObjective:
    """dpo, ipo, simpo or orpo: the mean of its loss over the pairs of a mini-batch."""

    config: AlgorithmConfig

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        if not inputs.numbers:
            return _loss_of_nothing(inputs)
        chosen_R = inputs.numbers[CHOSEN] > 0.5
        # a pair's margin, like its loss, is stored in its chosen sample
        margin_R = inputs.numbers["margin"][chosen_R]
        means = {
            "loss": inputs.numbers["loss"][chosen_R],
            "reward_margin": margin_R,
            "preference_accuracy": (margin_R > 0).float(),
            **_rewards_and_logprobs(inputs, chosen_R, CHOSEN),
            **_rewards_and_logprobs(inputs, ~chosen_R, "rejected"),
        }
        return LossOutputs(loss=_coupled_loss(inputs), metrics=token_metrics(means, {}))

    def couple(self, table: SampleTable) -> Mapping[str, NDArray[np.float64]]:
        """Compute slopes and metrics of the pairs. Raises TrainError for samples that
        are not pairs."""
        pairs = find_pairs(table)
        losses = self._losses(
            _sums(table, pairs.chosen_P), _sums(table, pairs.rejected_P)
        )
        num_pairs = len(pairs.chosen_P)
        margin_P = losses.chosen_reward_P - losses.rejected_reward_P
        none_P = np.zeros(num_pairs)
        return {
            "slope": pairs.spread(losses.chosen_slope_P, losses.rejected_slope_P)
            / num_pairs,
            "loss": pairs.spread(losses.loss_P, none_P),
            "share": pairs.spread(none_P + 1 / num_pairs, none_P),
            "reward": pairs.spread(losses.chosen_reward_P, losses.rejected_reward_P),
            "margin": pairs.spread(margin_P, none_P),
        }

    def _losses(self, chosen: SampleSums, rejected: SampleSums) -> PairLosses:
        name = self.config.objective
        settings: Section = getattr(self.config, name)
        return PAIR_LOSSES[name](chosen, rejected, **settings.model_dump())


@dataclass(frozen=True, slots=True)
class KtoObjective:
    """kto: the mean of its loss over the labelled samples of a mini-batch.

    The reference point comes from further samples, each with the prompt of one sample
    and the reply of the next (`mismatched_samples.py`). They have slope 0 and do not
    count."""

    config: AlgorithmConfig

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        if not inputs.numbers:
            return _loss_of_nothing(inputs)
        numbers = inputs.numbers
        labelled_R = numbers["share"] > 0
        desirable_R = labelled_R & (numbers[DESIRABLE] > 0.5)
        undesirable_R = labelled_R & (numbers[DESIRABLE] < 0.5)
        means = {
            "loss": numbers["loss"][labelled_R],
            "kl_baseline": numbers["baseline"],
            "preference_accuracy": (numbers["margin"][labelled_R] > 0).float(),
            **_rewards_and_logprobs(inputs, desirable_R, DESIRABLE),
            **_rewards_and_logprobs(inputs, undesirable_R, "undesirable"),
        }
        return LossOutputs(loss=_coupled_loss(inputs), metrics=token_metrics(means, {}))

    def couple(self, table: SampleTable) -> Mapping[str, NDArray[np.float64]]:
        """Compute slopes and metrics of the samples. Raises TrainError for samples
        without a label, or without mismatched samples."""
        settings = self.config.kto
        assert settings is not None
        desirable_M = _labels(table, DESIRABLE) > 0.5
        mismatched_M = (
            table.numbers.get(MISMATCHED, np.zeros(len(table.group_ids))) > 0.5
        )
        labelled_M = ~mismatched_M
        if not mismatched_M.any() or not labelled_M.any():
            raise TrainError(
                f"kto: {labelled_M.sum()} samples have a label, {mismatched_M.sum()} are mismatched"
            )
        baseline = preference_losses.kto_baseline(
            _sums(table, np.flatnonzero(mismatched_M))
        )
        losses = preference_losses.kto(
            _sums(table, np.arange(len(table.group_ids))),
            desirable_M,
            baseline=baseline,
            **settings.model_dump(),
        )
        share_M = labelled_M / labelled_M.sum()
        side_M = np.where(desirable_M, 1.0, -1.0)
        return {
            "slope": losses.slope_M * share_M,
            "loss": losses.loss_M,
            "share": share_M,
            "reward": losses.reward_M,
            "margin": side_M * (losses.reward_M - settings.beta * baseline),
            "baseline": np.full(len(share_M), baseline),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Indices into the samples of a table, int64 [P]."""

    chosen_P: NDArray[np.int64]
    rejected_P: NDArray[np.int64]

    def spread(
        self,
        chosen_values_P: NDArray[np.float64],
        rejected_values_P: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Assign the values to the samples: [P], [P] -> [2 P]."""
        values_M = np.empty(2 * len(self.chosen_P))
        values_M[self.chosen_P] = chosen_values_P
        values_M[self.rejected_P] = rejected_values_P
        return values_M


def find_pairs(table: SampleTable) -> Pairs:
    """Find the pairs. Raises TrainError that names a group which is not one chosen and
    one rejected sample."""
    is_chosen_M = _labels(table, CHOSEN) > 0.5
    samples_by_group: dict[str, tuple[list[int], list[int]]] = {}
    for sample, group_id in enumerate(table.group_ids):
        chosen, rejected = samples_by_group.setdefault(group_id, ([], []))
        (chosen if is_chosen_M[sample] else rejected).append(sample)
    for group_id, (chosen, rejected) in samples_by_group.items():
        if len(chosen) != 1 or len(rejected) != 1:
            found = f"{len(chosen)} chosen and {len(rejected)} rejected samples with a trained token"
            raise TrainError(f"group {group_id} has {found}; a pair has one of each")
    return Pairs(
        chosen_P=np.array(
            [chosen[0] for chosen, _ in samples_by_group.values()], np.int64
        ),
        rejected_P=np.array(
            [rejected[0] for _, rejected in samples_by_group.values()], np.int64
        ),
    )


def _labels(table: SampleTable, name: str) -> NDArray[np.float64]:
    """Return a number that all samples have, 0 or 1. Raises TrainError."""
    if name not in table.numbers:
        raise TrainError(
            f"not every sample has the number {name!r}: the objective needs samples with labels"
        )
    labels_M = table.numbers[name]
    wrong = [value for value in labels_M.tolist() if value not in (0.0, 1.0)]
    if wrong:
        raise TrainError(
            f"the number {name!r} of a sample is {wrong[0]}; it must be 0 or 1"
        )
    return labels_M


def _sums(table: SampleTable, samples: NDArray[np.int64]) -> SampleSums:
    current = table.current_M[samples]
    reference = np.zeros_like(current)
    if table.reference_M is not None:
        reference = table.reference_M[samples]
    return SampleSums(
        current=current, reference=reference, tokens=table.tokens_M[samples]
    )


def _coupled_loss(inputs: LossInputs) -> Tensor:
    """Return the value that `couple` computed, with its slope."""
    numbers = inputs.numbers
    sums_R = inputs.samples.sum(inputs.current_N)
    return (
        numbers["loss"] * numbers["share"]
        + numbers["slope"] * (sums_R - sums_R.detach())
    ).sum()


def _loss_of_nothing(inputs: LossInputs) -> LossOutputs:
    """Return the loss of a micro-batch without samples."""
    return LossOutputs(loss=inputs.current_N.sum(), metrics={})


def _rewards_and_logprobs(
    inputs: LossInputs, samples_R: Tensor, side: str
) -> dict[str, Tensor]:
    """Return implicit rewards, and sums of log-probs in nats, of the samples on one
    side."""
    sums_R = inputs.samples.sum(inputs.current_N.detach())
    return {
        f"reward_{side}": inputs.numbers["reward"][samples_R],
        f"logprob_{side}": sums_R[samples_R],
    }
