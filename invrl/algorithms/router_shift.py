"""Router shift: distance of the expert routers from the old policy, and the token
weight computed from it.

RSPO, "Towards Stable and Effective Reinforcement Learning for Mixture-of-Experts"
(arXiv 2510.23027v2, eq. 5 to 9). For each token and each of the L layers with experts,
e are the K experts that computed the token under the old policy, and r(e) is the
router's score as a share of all experts' scores:

    shift  = 1/L sum over layers  1/K sum over e  |log r_current(e) - log r_old(e)|
    weight = sg[ max(exp(-shift), router_shift_floor) ]

sg stops the gradient: the routers get none through it. The weight multiplies the ratio
current/old of a token before it is clipped or averaged over a sample. The equations are
numbered as in v2; the formula was read in a summary of the paper and in two
re-implementations of it, not in the paper's own text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.loss_inputs import LossInputs


def score_logprobs(logits_PE: Tensor, score: str) -> Tensor:
    """Return logarithms of the experts' shares of a token's scores: [P, E] -> [P, E],
    float32 at least.

    `score` is the router's function of its logits. Softmax scores are shares already.
    The paper does not cover sigmoid scores; dividing them by their sum is ours.
    """
    logits_PE = logits_PE.to(torch.promote_types(logits_PE.dtype, torch.float32))
    if score == "sigmoid":
        logits_PE = torch.nn.functional.logsigmoid(logits_PE)
    return logits_PE.log_softmax(-1)


def layer_shift(current_PK: Tensor, old_PK: Tensor) -> Tensor:
    """Return the shift of one layer [P], from log-scores of the same experts under both
    policies."""
    return (current_PK - old_PK).abs().mean(-1)


def log_weights(inputs: LossInputs, floor: float) -> Tensor:
    """Return the logarithm of each token's weight, detached: [N], between log(floor)
    and 0. 0 where old is the current policy. Raises ValueError for old log-probs
    without router shifts."""
    shift_N = inputs.router_shift_N
    if shift_N is None:
        if inputs.old_N is not None and inputs.old_N.numel():
            raise ValueError(
                f"router_shift_floor is {floor} but no shift of the routers is known"
            )
        return torch.zeros_like(inputs.current_N)
    return (-shift_N.detach()).clamp(min=math.log(floor))


def router_means(
    log_weight_N: Tensor, inputs: LossInputs, floor: float
) -> dict[str, Tensor]:
    """Return values whose means are metrics: each token's weight, and whether it is the
    floor."""
    shift_N = inputs.router_shift_N
    floored_N = (
        torch.zeros_like(log_weight_N)
        if shift_N is None
        else -shift_N < math.log(floor)
    )
    return {
        "router_weight_mean": log_weight_N.exp(),
        "router_weight_floored_fraction": floored_N,
    }
