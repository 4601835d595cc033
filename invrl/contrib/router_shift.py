"""RSPO's weight of tokens whose routers have moved since the old policy.

`--ratio-weight invrl.contrib.router_shift:RouterShift`, or the preset `rspo`; only for
models with experts. "Towards Stable and Effective Reinforcement Learning for
Mixture-of-Experts" (arXiv 2510.23027v2, eq. 5 to 9), numbered as in v2; the formula was
read in a summary of the paper and in two re-implementations of it, not in the paper's
own text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from invrl.algorithms.objectives.objectives import Needs
from invrl.errors import ConfigError
from invrl.types.section import Section

if TYPE_CHECKING:
    from invrl.algorithms.loss_inputs import LossInputs, TokenWeights
    from invrl.run.settings.config import Config


class RouterShift(Section):
    """The weight of each token's ratio.

        weight = sg[ max(exp(-shift), floor) ]

    The shift is that of `algorithms/policy_loss/router_shift.py`; sg stops the
    gradient: the routers get none through it. The weight multiplies the ratio
    current/old of a token before it is clipped or averaged over a row. It is 1 where
    old is the current policy."""

    needs: ClassVar = Needs(old=True, router_shift=True)
    floor: float = Field(
        0.8, gt=0, lt=1, description="smallest weight (0.8 in the paper)"
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError where no router moves, or no ratio is weighed."""
        algorithm = config.algorithm
        reason = fix = ""
        if algorithm.old_logprobs != "recompute":
            reason = (
                f"with --old-logprobs {algorithm.old_logprobs} no pass says what the routers were like under "
                "the old policy"
            )
            fix = "use --old-logprobs recompute, or leave it out"
        elif algorithm.current_is_old:
            reason = "a batch has one optimizer step, in which the current policy is the old one: no router moves"
            fix = "set --num-mini-batches to 2 or more, or leave it out"
        elif algorithm.policy_loss in ("vespo", "policy_gradient"):
            reason = f"{algorithm.policy_loss} has no ratio that it could weigh"
            fix = "leave it out"
        if reason:
            raise ConfigError(
                "algorithm.ratio_weight", algorithm.ratio_weight, reason, fix
            )

    def __call__(self, inputs: LossInputs) -> TokenWeights:
        """Return the logarithm of each token's weight, between log(floor) and 0. Raises
        ValueError for old log-probs without router shifts."""
        import torch

        from invrl.algorithms.loss_inputs import TokenWeights

        shift_N = inputs.router_shift_N
        if shift_N is None:
            if inputs.old_N is not None and inputs.old_N.numel():
                raise ValueError("no shift of the routers is known")
            shift_N = torch.zeros_like(inputs.current_N)
        shift_N = shift_N.detach()
        log_floor = math.log(self.floor)
        log_weights_N = (-shift_N).clamp(min=log_floor)
        means = {
            "router_weight_mean": log_weights_N.exp(),
            "router_weight_floored_fraction": -shift_N < log_floor,
        }
        return TokenWeights(log_weights_N=log_weights_N, means=means)
