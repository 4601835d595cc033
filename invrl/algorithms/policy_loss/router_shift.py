"""Router shift: distance of the expert routers from the old policy.

For each token and each of the L layers with experts, e are the K experts that computed
the token under the old policy, and r(e) is the router's score as a share of all
experts' scores:

    shift = 1/L sum over layers  1/K sum over e  |log r_current(e) - log r_old(e)|

RSPO (arXiv 2510.23027v2, eq. 5 to 9). `contrib/router_shift.py` makes a token weight of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
