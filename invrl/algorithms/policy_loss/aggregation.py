"""Aggregation of token losses into one number: the weight of each token in the sum

    L = sum_t w_t l_t

Denominators are those of the whole mini-batch, so the sums of micro-batches and ranks
can be added.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from invrl.algorithms.loss_inputs import Denominators, Samples

Aggregation = Callable[[Samples, Denominators, float], Tensor]
"""Weight [R] of each sample's tokens. The last argument is the setting
`aggregation_constant`."""


def token_mean(samples: Samples, denominators: Denominators, constant: float) -> Tensor:
    """The mean over all trained tokens: w = 1 / tokens.

    Every token has the same weight, however long its rollout is (DAPO, arXiv
    2503.14476, section 3.3).
    """
    return torch.ones_like(samples.tokens_R) / denominators.tokens


def sequence_mean(
    samples: Samples, denominators: Denominators, constant: float
) -> Tensor:
    """The mean over samples of each sample's mean: w = 1 / (samples x tokens of the
    sample).

    GRPO's (arXiv 2402.03300, eq. 3), where a sample is a sequence.
    """
    return 1.0 / (denominators.samples * samples.tokens_R)


def rollout_mean(
    samples: Samples, denominators: Denominators, constant: float
) -> Tensor:
    """The mean over rollouts of each rollout's mean: w = 1 / (rollouts x tokens of the
    rollout).

    Also GRPO's (arXiv 2402.03300, eq. 3). Unlike in `sequence_mean`, a rollout with
    several trajectories counts once.
    """
    return 1.0 / (denominators.rollouts * samples.rollout_tokens_R)


def group_mean(samples: Samples, denominators: Denominators, constant: float) -> Tensor:
    """The mean over groups of each group's mean: w = 1 / (groups x tokens of the
    group).

    Every task has the same weight, however long its rollouts are. DAPO's eq. 8 (arXiv
    2503.14476) takes this mean inside the expectation over prompts.
    """
    return 1.0 / (denominators.groups * samples.group_tokens_R)


def constant(samples: Samples, denominators: Denominators, constant: float) -> Tensor:
    """The mean over rollouts of each rollout's sum divided by a constant: w = 1 /
    (rollouts x constant).

    Dr. GRPO's (arXiv 2503.20783, appendix with the code, where the constant is the
    generation budget).
    """
    return torch.ones_like(samples.tokens_R) / (denominators.rollouts * constant)


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "rollout_mean": rollout_mean,
    "group_mean": group_mean,
    "constant": constant,
}
