"""Off-policy correction: weights of token losses, because the engine did not sample
from the old policy.

The engine (the rollout policy) differs from the trainer's old policy in kernels,
precision or weight version. Two settings make the weight, each at its own level:

    w_t = clamp(ratio, correction_floor, correction_cap) * 1[low <= ratio' <=
    high]

Levels of the ratio old/rollout: `token` is the token's; `sequence` the product over the
sample's trained tokens; `geometric` their geometric mean. For example

| published as | `correction` | `rejection` |
|---|---|---|
| truncated importance sampling (TIS, Yao et al. 2025) | truncated | none |
| masked tokens: IcePop (Ring-1T, arXiv 2510.18855) | truncated, cap = rejection.high | token |
| truncated sequences (verl's Seq-TIS) | sequence_truncated | none |
| masked sequences (verl's Seq-MIS) | sequence_truncated, cap = rejection.high | sequence |
| geometric rejection (verl's Geo-RS; arXiv 2512.23075) | none | geometric |
| the same with weights (verl's Geo-RS-Token-TIS) | truncated | geometric |

A rejected token has weight 0 and stays in the denominators, as in TRL, AReaL and slime;
verl takes it out of them where old log-probs are recomputed. The KL term and the
entropy bonus of a rejected token stay. A weight is never divided by the mean weight of
the batch.

RSPO's weight for moved routers belongs to the ratio current/old (`router_shift.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Samples
from invrl.algorithms.policy_loss.ratios import clamp_log_ratio


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """The weight of each token."""

    weight_N: Tensor
    """float32 [N], detached; 0 where rejected."""
    capped_N: Tensor
    """bool [N]: whether a bound (`correction_cap`, `correction_floor`) changed the
    weight."""
    rejected_N: Tensor


def token_level(log_ratio_N: Tensor, samples: Samples) -> Tensor:
    """Return the log-ratios unchanged: [N] -> [N]."""
    return log_ratio_N


def sequence_level(log_ratio_N: Tensor, samples: Samples) -> Tensor:
    """Sum over the token's sample, the logarithm of the product of ratios: [N] ->
    [N]."""
    return samples.spread(samples.sum(log_ratio_N))


def geometric_level(log_ratio_N: Tensor, samples: Samples) -> Tensor:
    """Mean over the token's sample: [N] -> [N]."""
    return samples.spread(samples.mean(log_ratio_N))


LEVELS: dict[str, Callable[[Tensor, Samples], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "geometric": geometric_level,
}
CORRECTIONS = {
    "truncated": "token",
    "sequence_truncated": "sequence",
    "geometric_truncated": "geometric",
}
"""Level of each correction except `none`."""


def correct(
    old_N: Tensor, rollout_N: Tensor, samples: Samples, config: AlgorithmConfig
) -> Correction:
    """Return the weight in the module's docstring, from log-probs [N], [N].

    Truncated importance sampling is Ionides 2008; Yao et al. 2025 proposed it against
    the mismatch of sampler and trainer, "Your efficient RL framework secretly
    brings you off-policy RL training". Logarithms of ratios are clamped at
    `ratios.LOG_RATIO_BOUND` at their level, as in verl.
    """
    log_ratio_N = old_N.detach() - rollout_N.detach()

    def ratio(level: str) -> Tensor:
        return clamp_log_ratio(LEVELS[level](log_ratio_N, samples)).exp()

    weight_N = torch.ones_like(log_ratio_N)
    capped_N = torch.zeros_like(log_ratio_N, dtype=torch.bool)
    if config.correction != "none":
        ratio_N = ratio(CORRECTIONS[config.correction])
        weight_N = ratio_N.clamp(config.correction_floor, config.correction_cap)
        capped_N = ratio_N > config.correction_cap
        if config.correction_floor is not None:
            capped_N = capped_N | (ratio_N < config.correction_floor)
    rejected_N = torch.zeros_like(capped_N)
    rejection = config.rejection
    if rejection is not None:
        ratio_N = ratio(rejection.kind)
        if rejection.low is not None:
            rejected_N = ratio_N < rejection.low
        if rejection.high is not None:
            rejected_N = rejected_N | (ratio_N > rejection.high)
    return Correction(
        weight_N=weight_N.masked_fill(rejected_N, 0.0),
        capped_N=capped_N,
        rejected_N=rejected_N,
    )
