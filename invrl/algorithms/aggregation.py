"""Aggregation: how token losses become one number. Denominators are global (over micro-batches and ranks),
so that what the micro-batches return may simply be added."""

from collections.abc import Callable

from torch import Tensor


def token_mean(losses_N: Tensor, denominator: float) -> Tensor:
    """sum(l) / denominator, with the mini-batch's global number of trained tokens: every token weighs the
    same, however long its rollout (DAPO, arXiv 2503.14476, section 3.3). N = 0: 0 with a gradient path."""
    if losses_N.numel() == 0:
        return losses_N.sum()
    if denominator < losses_N.numel():
        raise ValueError(f"denominator {denominator} for {losses_N.numel()} tokens of one micro-batch")
    return losses_N.sum() / denominator


AGGREGATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"token_mean": token_mean}
