"""Supervised fine-tuning: the negative log-likelihood of the trained tokens."""

import torch

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, token_metrics
from invrl.algorithms.policy_loss.aggregation import AGGREGATIONS

ROW_WEIGHT = "weight"
"""Number of a sample that multiplies its losses; 1 by default."""


def sft_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """Maximum likelihood:

        loss = -sum_t a_t w_t log pi(token_t)

    a_t is the setting `aggregation`, w_t the number `weight` of the token's sample.
    Weights change a sample's loss and no denominator: samples of weight 0 still count
    as samples. The aggregation `token_mean` is the cross-entropy over all trained
    tokens of the mini-batch (TRL's SFTTrainer divides by the same number,
    `num_items_in_batch`); `sequence_mean` gives every sample the same weight."""
    losses_N = -inputs.current_N
    weight_R = inputs.numbers.get(ROW_WEIGHT)
    weighted_N = (
        losses_N if weight_R is None else losses_N * inputs.samples.spread(weight_R)
    )
    aggregation = AGGREGATIONS[config.aggregation]
    of_sample_R = aggregation(
        inputs.samples, inputs.denominators, config.aggregation_constant or 1.0
    )
    loss = (inputs.samples.spread(of_sample_R) * weighted_N).sum()
    with torch.no_grad():
        means = {"loss": weighted_N, "nll": losses_N}
        if inputs.entropy_N is not None:
            means["entropy"] = inputs.entropy_N
        return LossOutputs(loss=loss, metrics=token_metrics(means, {}))
