"""Aggregation: how token losses become one number.

Denominators are global (over micro-batches and ranks), so the results of micro-batches may simply be added.
"""

from collections.abc import Callable

from torch import Tensor


def token_mean(losses_N: Tensor, denominator: float) -> Tensor:
    """The mean over all trained tokens of the mini-batch: [N] -> scalar.

        L = sum_t l_t / D

    D, the denominator, is the mini-batch's global number of trained tokens. Every token has the same weight,
    however long its rollout is (DAPO, arXiv 2503.14476, section 3.3). With N = 0 the result is 0 and still
    has a gradient path. Raises ValueError for a denominator below N.
    """
    num_tokens = losses_N.numel()
    if num_tokens == 0:
        return losses_N.sum()
    if denominator < num_tokens:
        raise ValueError(f"denominator {denominator} for {num_tokens} tokens of one micro-batch")
    return losses_N.sum() / denominator


AGGREGATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"token_mean": token_mean}
