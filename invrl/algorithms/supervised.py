"""Supervised fine-tuning: the log-likelihood of given replies.

    L = - sum_t a_t log p(y_t | x, y_<t)

over the trained tokens; a_t is the setting `aggregation` (`token_mean`: one over the mini-batch's trained
tokens, the cross-entropy of language-model training). The sum of micro-batches and ranks does not depend on
how the tokens were split.
"""

from invrl.algorithms.aggregation import AGGREGATIONS
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, token_metrics


def sft_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The loss in the module's docstring. The metric `loss` is the mean over tokens, in nats."""
    aggregation = AGGREGATIONS[config.aggregation]
    weight_R = aggregation(inputs.rows, inputs.denominators, config.aggregation_constant)
    losses_N = -inputs.current_N
    means = {"loss": losses_N}
    if inputs.entropy_N is not None:
        means["entropy"] = inputs.entropy_N
    loss = (inputs.rows.spread(weight_R) * losses_N).sum()
    return LossOutputs(loss=loss, metrics=token_metrics(means, {}))
