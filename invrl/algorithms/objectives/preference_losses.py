"""Preference losses as functions of the log-prob sums of whole samples, and their
slopes: derivatives with respect to a sample's sum of log-probs. Pure NumPy, float64.

Axes: P pairs, M samples. A pair is a chosen and a rejected sample. With s a sample's
sum of log-probs under the current policy, f the same under the frozen reference, T its
trained tokens, c the chosen and r the rejected sample, and sigma the logistic function:

    dpo     -log sigma(beta ((s_c - f_c) - (s_r - f_r)))                    arXiv 2305.18290, eq. 7
    ipo     ((s_c - f_c) / T_c - (s_r - f_r) / T_r - 1 / (2 beta))^2        arXiv 2310.12036, eq. 17
    simpo   -log sigma(beta (s_c / T_c - s_r / T_r) - gamma)                arXiv 2405.14734, eq. 6
    orpo    -s_c / T_c - lambda log sigma(log odds_c - log odds_r)          arXiv 2403.07691, eq. 4, 6, 7
    kto     lambda_D (1 - sigma(beta (s - f - z))) if desirable,            arXiv 2402.01306, eq. 7, 8
            lambda_U (1 - sigma(beta (z - s + f))) otherwise

Each function says where an implementation differs from its paper, and which we follow.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_MEAN_LOGPROB = -1e-7
"""Upper bound of mean log-probs in the odds of `orpo`: float32 log-probs resolve no
more, and at 0 the odds are infinite."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleSums:
    """Samples of one kind: float64, all of one shape."""

    current: Values
    reference: Values
    """The same under the frozen reference; 0 if the loss does not need it."""
    tokens: Values

    @property
    def gap(self) -> Values:
        """Log-ratio of the whole sample to the reference."""
        return self.current - self.reference

    @property
    def mean(self) -> Values:
        """Log-prob per token."""
        return self.current / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairLosses:
    """float64 [P] each."""

    loss_P: Values
    chosen_slope_P: Values
    rejected_slope_P: Values
    chosen_reward_P: Values
    """Implicit reward of the chosen sample. Its difference to that of the rejected one
    is the margin."""
    rejected_reward_P: Values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleLosses:
    """float64 [M] each."""

    loss_M: Values
    slope_M: Values
    reward_M: Values


def dpo(
    chosen: SampleSums, rejected: SampleSums, *, beta: float, label_smoothing: float
) -> PairLosses:
    """DPO (arXiv 2305.18290, eq. 7).

    `label_smoothing` is the probability of a wrong label, as in the authors' code
    (conservative DPO): (1 - e) loss(margin) + e loss(-margin). TRL's loss `sigmoid` has
    none; its `robust` divides by 1 - 2e.
    """
    rewards_c = beta * chosen.gap
    rewards_r = beta * rejected.gap
    loss_P, slope_P = _logistic(rewards_c - rewards_r, label_smoothing)
    return PairLosses(
        loss_P=loss_P,
        chosen_slope_P=beta * slope_P,
        rejected_slope_P=-beta * slope_P,
        chosen_reward_P=rewards_c,
        rejected_reward_P=rewards_r,
    )


def ipo(chosen: SampleSums, rejected: SampleSums, *, beta: float) -> PairLosses:
    """IPO (arXiv 2310.12036, eq. 17; its tau is `beta`).

    Log-ratios are means over a sample's tokens, as TRL has them after asking the
    authors; the equation, and the code of DPO's authors, have sums, with which the
    target 1 / (2 beta) would depend on the length."""
    gap_c = chosen.gap / chosen.tokens
    gap_r = rejected.gap / rejected.tokens
    error_P = gap_c - gap_r - 1 / (2 * beta)
    return PairLosses(
        loss_P=error_P**2,
        chosen_slope_P=2 * error_P / chosen.tokens,
        rejected_slope_P=-2 * error_P / rejected.tokens,
        chosen_reward_P=beta * gap_c,
        rejected_reward_P=beta * gap_r,
    )


def simpo(
    chosen: SampleSums,
    rejected: SampleSums,
    *,
    beta: float,
    gamma: float,
    label_smoothing: float,
) -> PairLosses:
    """SimPO (arXiv 2405.14734, eq. 6). No reference. `label_smoothing` as in the
    authors' code.

    TRL (CPOTrainer, loss `simpo`) has the same `gamma`; the authors' code is given
    gamma / beta. TRL adds an NLL term unless `cpo_alpha` is 0; the paper has none.
    """
    rewards_c = beta * chosen.mean
    rewards_r = beta * rejected.mean
    loss_P, slope_P = _logistic(rewards_c - rewards_r - gamma, label_smoothing)
    return PairLosses(
        loss_P=loss_P,
        chosen_slope_P=beta * slope_P / chosen.tokens,
        rejected_slope_P=-beta * slope_P / rejected.tokens,
        chosen_reward_P=rewards_c,
        rejected_reward_P=rewards_r,
    )


def orpo(chosen: SampleSums, rejected: SampleSums, *, weight: float) -> PairLosses:
    """ORPO (arXiv 2403.07691, eq. 6 and 7): the chosen sample's NLL per token, and
    `weight` (lambda) times the odds-ratio loss. No reference. With a = s / T, a
    sample's log-odds are a - log(1 - exp(a)), whose derivative is 1 / (1 - exp(a)).

    TRL's NLL runs over the prompt too, and is a mean over the tokens of a micro-batch;
    here it is the paper's mean over the reply, and a mean over pairs.
    """
    mean_c = np.minimum(chosen.mean, LARGEST_MEAN_LOGPROB)
    mean_r = np.minimum(rejected.mean, LARGEST_MEAN_LOGPROB)
    ratio_loss_P, slope_P = _logistic(_log_odds(mean_c) - _log_odds(mean_r), 0.0)
    return PairLosses(
        loss_P=-chosen.mean + weight * ratio_loss_P,
        chosen_slope_P=(weight * slope_P / -np.expm1(mean_c) - 1) / chosen.tokens,
        rejected_slope_P=-weight * slope_P / -np.expm1(mean_r) / rejected.tokens,
        chosen_reward_P=weight * chosen.mean,
        rejected_reward_P=weight * rejected.mean,
    )


def kto(
    samples: SampleSums,
    desirable_M: NDArray[np.bool_],
    *,
    baseline: float,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> SampleLosses:
    """KTO (arXiv 2402.01306, eq. 7 and 8). `baseline` is z of `kto_baseline`, without
    gradient."""
    side_M = np.where(desirable_M, 1.0, -1.0)
    weight_M = np.where(desirable_M, desirable_weight, undesirable_weight)
    log_value_M = _log_sigmoid(side_M * beta * (samples.gap - baseline))
    log_loss_M = _log_sigmoid(-side_M * beta * (samples.gap - baseline))
    return SampleLosses(
        loss_M=weight_M * np.exp(log_loss_M),
        slope_M=-side_M * weight_M * beta * np.exp(log_value_M + log_loss_M),
        reward_M=beta * samples.gap,
    )


def kto_baseline(mismatched: SampleSums) -> float:
    """KTO's reference point z: the mean log-ratio of replies that belong to other
    prompts, at least 0 (arXiv 2402.01306, section 4.1: an estimate of KL(policy ||
    reference), in nats per reply).

    The paper and TRL take the mean over a micro-batch (TRL then over ranks); here it is
    over all samples of the mini-batch, on all ranks. Raises ValueError without a
    sample."""
    if not len(mismatched.current):
        raise ValueError("KTO's reference point needs a mismatched sample")
    return max(0.0, float(mismatched.gap.mean()))


def _logistic(margin_P: Values, label_smoothing: float) -> tuple[Values, Values]:
    """Return -log sigma(margin) with smoothed labels, and its derivative."""
    right_P = _log_sigmoid(margin_P)
    wrong_P = _log_sigmoid(-margin_P)
    loss_P = -(1 - label_smoothing) * right_P - label_smoothing * wrong_P
    slope_P = -(1 - label_smoothing) * np.exp(wrong_P) + label_smoothing * np.exp(
        right_P
    )
    return loss_P, slope_P


def _log_sigmoid(values: Values) -> Values:
    return -np.logaddexp(0.0, -values)


def _log_odds(mean_P: Values) -> Values:
    """Return log(p / (1 - p)) of log p < 0."""
    return mean_P - np.log(-np.expm1(mean_P))


PAIR_LOSSES: dict[str, Callable[..., PairLosses]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
"""Each with the settings of its table, [algorithm.NAME], as keywords."""
