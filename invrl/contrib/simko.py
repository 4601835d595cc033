"""SimKO: PPO's clip with other ratios where the policy is undecided (arXiv 2510.14807).

`--policy-loss invrl.contrib.simko:SimKO`, with `--rollout-top-logprobs 3`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat

from invrl.algorithms.objectives.objectives import Needs
from invrl.algorithms.policy_loss.policy_losses import (
    PolicyLossInputs,
    TokenLosses,
    clipped_losses,
)
from invrl.errors import ConfigError
from invrl.types.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.loss_inputs import Samples
    from invrl.run.settings.config import Config


class SimKO(Section):
    """SimKO (eq. 3 to 5).

        A > 0:  r+ = (1 - alpha) r + alpha / K  sum over n of sg[r / r_n] r_n
        A < 0:  r- = lambda r if the sampled token is the likeliest, else r

    They act on the tokens whose entropy is above the quantile `entropy_quantile` of
    their sample; sg stops the gradient. n are the K tokens that the policy which
    sampled held likeliest, r_n is their own ratio, and lambda is `top1_weight`. The
    value of r+ is r, and its gradient is shared with the K tokens: sg[r / r_n] r_n has
    the gradient r grad log p_n, in which the old log-prob of n cancels, so it is not
    computed. The entropy is that of the current policy. A token without candidates
    keeps r.

    The authors' code takes the K likeliest of the current policy, calls a rollout with
    reward 1 positive instead of one with A > 0, and multiplies A by lambda instead of
    r, so that its clip is at r.
    """

    needs: ClassVar = Needs(top_logprobs=True)
    alpha: float = Field(
        0.01,
        ge=0.0,
        le=1.0,
        description="share of a token's gradient that the likeliest tokens get",
    )
    top1_weight: PositiveFloat = Field(
        1.1,
        description="factor of the ratio of a likeliest token whose advantage is negative",
    )
    entropy_quantile: float = Field(
        0.8,
        ge=0.0,
        le=1.0,
        description="quantile of a sample's entropies above which tokens are changed",
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError for ratios that are not of single tokens."""
        level = config.algorithm.ratio_level
        if level != "token":
            reason = (
                "SimKO changes the ratios of single tokens by their own probabilities"
            )
            raise ConfigError(
                "algorithm.ratio_level", level, reason, "leave --ratio-level out"
            )

    def __call__(self, of: PolicyLossInputs) -> TokenLosses:
        """Compute the loss of each token."""
        inputs = of.inputs
        top = inputs.top
        assert top is not None, "the needs name them"
        assert inputs.entropy_N is not None, "the step has the entropies"
        undecided_N = _above_quantile(
            inputs.entropy_N.detach(), inputs.samples, self.entropy_quantile
        )
        is_token_NK = top.is_token_NK
        own_NK = top.current_NK.masked_fill(~is_token_NK, 0.0)
        # 1, with the gradient of log p_n
        shared_NK = (own_NK - own_NK.detach()).exp() * is_token_NK
        num_N = is_token_NK.sum(dim=1)
        shared_N = of.ratio_N.detach() * shared_NK.sum(dim=1) / num_N.clamp(min=1)
        mixed_N = (1.0 - self.alpha) * of.ratio_N + self.alpha * shared_N
        is_mixed_N = undecided_N & (of.advantages_N > 0) & (num_N > 0)
        is_raised_N = undecided_N & (of.advantages_N < 0) & top.is_sampled_NK[:, 0]
        ratio_N = mixed_N.where(is_mixed_N, of.ratio_N)
        ratio_N = (self.top1_weight * of.ratio_N).where(is_raised_N, ratio_N)
        clipped = clipped_losses(replace(of, ratio_N=ratio_N))
        means = {
            **clipped.means,
            "simko_mixed_fraction": is_mixed_N,
            "simko_raised_fraction": is_raised_N,
        }
        return TokenLosses(losses_N=clipped.losses_N, means=means)


def _above_quantile(values_N: Tensor, samples: Samples, quantile: float) -> Tensor:
    """Whether a token's value is above the interpolated quantile of its sample's
    values."""
    bound_R = values_N.new_empty(len(samples.tokens_R))
    for sample, values_T in enumerate(values_N.split(samples.tokens_R.long().tolist())):
        bound_R[sample] = values_T.quantile(quantile)
    return values_N > samples.spread(bound_R)
