"""DPPO with a divergence over the likeliest tokens (arXiv 2602.04879).

`--policy-loss invrl.contrib.dppo_topk:DPPOTotalVariation` (or `DPPODivergence`), with
`--rollout-top-logprobs 20`. The mask is that of the built-in `dppo_tv`, for a distance
of the current policy p from the sampling policy q over A'': the K likeliest tokens of
q, the sampled token, and one outcome for all others together (section 4.4). The
authors' code counts a sampled token outside of the K among the others; the paper does
not, and neither do we. A token without known candidates has the binary divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat

from invrl.algorithms.objectives.objectives import Needs
from invrl.algorithms.policy_loss.policy_losses import (
    LEAST_PROBABILITY,
    PolicyLossInputs,
    TokenLosses,
    masked_by_distance,
)
from invrl.errors import ConfigError
from invrl.types.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.run.settings.config import Config


class _TopK(Section):
    needs: ClassVar = Needs(top_logprobs=True)
    threshold: PositiveFloat = Field(
        0.2,
        description="distance from the policy that sampled above which a token is masked",
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError for ratios that are not of single tokens."""
        level = config.algorithm.ratio_level
        if level != "token":
            reason = f"{config.algorithm.policy_loss} masks single tokens by their own probabilities"
            raise ConfigError(
                "algorithm.ratio_level", level, reason, "leave --ratio-level out"
            )


class DPPOTotalVariation(_TopK):
    """DPPO with the total variation over the likeliest tokens (eq. 12 and 15).

    D = 1/2 sum over a in A'' of |q(a) - p(a)|
    """

    def __call__(self, of: PolicyLossInputs) -> TokenLosses:
        """Compute the loss of each token."""
        distance_N = 0.5 * _over_outcomes(of, _variation)
        return masked_by_distance(of, distance_N, self.threshold)


class DPPODivergence(_TopK):
    """DPPO with the KL divergence over the likeliest tokens (eq. 12 and 16).

        D = sum over a in A'' of q(a) log(q(a) / p(a))

    The probability of all other tokens together is at least 1e-8; in the authors' code
    it is 1e-12, less than float32 can resolve next to 1.
    """

    def __call__(self, of: PolicyLossInputs) -> TokenLosses:
        """Compute the loss of each token."""
        distance_N = _over_outcomes(of, _divergence)
        return masked_by_distance(of, distance_N, self.threshold)


def _over_outcomes(
    of: PolicyLossInputs, term: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Sum [N] over A'' of a term of the log-probs log q(a) and log p(a): over the K
    candidates, the sampled token if it is not among them, and all others together."""
    top = of.inputs.top
    assert top is not None, "the needs name them"
    is_extra_N = ~top.is_sampled_NK.any(dim=1)
    rollout_N = of.inputs.rollout_N
    current_N = of.inputs.current_N.detach()
    current_NK = top.current_NK.detach()

    def others(logprobs_NK: Tensor, logprobs_N: Tensor) -> Tensor:
        known_N = logprobs_NK.exp().sum(dim=1) + logprobs_N.exp() * is_extra_N
        return (1.0 - known_N).clamp(min=LEAST_PROBABILITY).log()

    of_candidates_N = term(top.rollout_NK, current_NK).sum(dim=1)
    of_sampled_N = term(rollout_N, current_N) * is_extra_N
    of_others_N = term(others(top.rollout_NK, rollout_N), others(current_NK, current_N))
    return of_candidates_N + of_sampled_N + of_others_N


def _variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() - log_p.exp()).abs()


def _divergence(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p)).masked_fill(log_q == -math.inf, 0.0)
