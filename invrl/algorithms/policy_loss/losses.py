"""The loss of one micro-batch, where the axes meet.

There are three policies: *rollout* (the engine sampled from it), *old* (the proximal
policy) and *current* (the one with a gradient). The policy loss bounds current/old, the
correction weighs old/rollout:

    loss = sum_t a_t [ w_t * policy_loss(r_t, A_t) + kl.coefficient * KL(current_t,
    reference_t) - entropy.coefficient * H_t ]

    r_t = current_t / old_t         ratios.py, old_policy.py; times the user's `ratio_weight`
    policy_loss                     policy_losses.py
    w_t from old_t / rollout_t      corrections.py
    KL                              kl.py, at most kl.clamp
    H_t                             the entropy of the current distribution
    a_t                             aggregation.py, times the user's `sample_weight`
    A_t                             advantages.py, computed when the batch is taken

`solved_nll_coef` adds the likelihood of rollouts that solved their task
(`_solved_nll`).

With `kl.added_to` reward the KL term is in A_t instead (`_with_kl_penalty`; with a
critic, in the rewards that A_t is estimated from), and with `rollout_reward` in the
rewards that are compared.

No single token can dominate a step: log-ratios are clamped before exp (`ratios.py`),
the KL term is bounded by `kl.clamp`, and the policy loss `clip` has a dual clip.

Invariant: the sum of `loss` over micro-batches and ranks, and of its gradient, does not
depend on how the samples were split.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, token_metrics
from invrl.algorithms.policy_loss.aggregation import AGGREGATIONS
from invrl.algorithms.policy_loss.axis_plugins import (
    load_ratio_weight,
    load_sample_weight,
)
from invrl.algorithms.policy_loss.corrections import Correction, correct
from invrl.algorithms.policy_loss.kl import estimate, k3, to_go
from invrl.algorithms.policy_loss.old_policy import old_logprobs
from invrl.algorithms.policy_loss.policy_losses import (
    PolicyLossInputs,
    policy_loss_function,
)
from invrl.algorithms.policy_loss.ratios import RATIOS
from invrl.algorithms.tables import KlConfig
from invrl.types.batches import SOLVED_NUMBER
from invrl.types.metrics import Metric


def policy_loss(
    inputs: LossInputs,
    config: AlgorithmConfig,
    *,
    more_means: Mapping[str, Tensor] = MappingProxyType({}),
) -> LossOutputs:
    """Compute the loss in the module's docstring. `more_means` are numbers [N] whose
    means become metrics.

    Raises ValueError for a KL without reference log-probs, an entropy bonus without
    entropies, and a solved_nll_coef for samples without the number `solved`;
    PluginError for user code that cannot be loaded, and a policy loss that cannot be
    trained."""
    kl = config.kl
    entropy = config.entropy
    _check_inputs(inputs, config)
    old_N = old_logprobs(inputs, config)
    advantages_N = _with_kl_penalty(inputs, old_N, config)
    ratio_N, means_of_weights = _ratios(inputs, old_N, config)
    policy_loss = policy_loss_function(config)
    policy_losses = policy_loss(
        PolicyLossInputs(
            ratio_N=ratio_N, advantages_N=advantages_N, inputs=inputs, config=config
        )
    )
    correction = correct(old_N, inputs.rollout_N, inputs.samples, config)
    losses_N = correction.weight_N * policy_losses.losses_N
    if kl is not None and kl.added_to == "loss":
        losses_N = losses_N + kl.coefficient * _kl_term(inputs, inputs.current_N, kl)
    if entropy is not None and entropy.coefficient and inputs.entropy_N is not None:
        losses_N = losses_N - entropy.coefficient * inputs.entropy_N
    aggregation = AGGREGATIONS[config.aggregation]
    weight_R = aggregation(
        inputs.samples, inputs.denominators, config.aggregation_constant or 1.0
    )
    sums: Mapping[str, Tensor] = {}
    sample_weight = load_sample_weight(config)
    if sample_weight is not None and len(weight_R):
        sample_weights = sample_weight(inputs, weight_R, losses_N.detach())
        weight_R = sample_weights.weights_R
        sums = sample_weights.sums
    loss = (inputs.samples.spread(weight_R) * losses_N).sum()
    means_of_solved: dict[str, Tensor] = {}
    if config.solved_nll_coef:
        nll, means_of_solved = _solved_nll(inputs)
        loss = loss + config.solved_nll_coef * nll

    with torch.no_grad():
        means = {
            "loss": losses_N,
            "ratio_mean": ratio_N,
            **policy_losses.means,
            **means_of_weights,
            **means_of_solved,
            **more_means,
        }
        maxima = {"ratio_max": ratio_N}
        metrics = _metrics(
            inputs, old_N, correction, config, means=means, maxima=maxima, sums=sums
        )
    return LossOutputs(loss=loss, metrics=metrics)


def _check_inputs(inputs: LossInputs, config: AlgorithmConfig) -> None:
    if config.kl is not None and inputs.reference_N is None:
        raise ValueError("there is a KL to the reference but no reference log-probs")
    entropy = config.entropy
    if entropy is not None and entropy.coefficient and inputs.entropy_N is None:
        raise ValueError("there is an entropy bonus but there are no entropies")


def _ratios(
    inputs: LossInputs, old_N: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return current/old [N] at the level of the settings, times the user's
    `ratio_weight`, and numbers [N] whose means become metrics."""
    weighted_N = inputs.current_N
    means: Mapping[str, Tensor] = {}
    ratio_weight = load_ratio_weight(config)
    if ratio_weight is not None:
        weights = ratio_weight(inputs)
        weighted_N = weighted_N + weights.log_weights_N
        means = weights.means
    return RATIOS[config.ratio_level](weighted_N, old_N, inputs.samples), means


def _solved_nll(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """VAPO's likelihood term (arXiv 2504.05118, eq. 9): the mean over the tokens of all
    rollouts of the mini-batch that solved their task, of which this returns the
    micro-batch's part.

        -sum_{i solved} sum_t log p_it / sum_{i solved} |o_i|

    Neither the correction nor a clip acts on it. It is 0 if nothing was solved.
    """
    if not len(inputs.samples.tokens_R):
        return inputs.current_N.sum(), {}
    if SOLVED_NUMBER not in inputs.numbers:
        raise ValueError(
            f"solved_nll_coef is set but samples have no number {SOLVED_NUMBER!r}"
        )
    is_solved_N = inputs.samples.spread(inputs.numbers[SOLVED_NUMBER]) > 0.5
    nll_N = -inputs.current_N.masked_select(is_solved_N)
    loss = nll_N.sum() / max(inputs.denominators.solved_tokens, 1.0)
    return loss, {"solved_nll": nll_N}


def _kl_term(inputs: LossInputs, policy_N: Tensor, kl: KlConfig) -> Tensor:
    """Return the KL term of the loss or the reward: `_divergence` within the clamp."""
    bound = kl.clamp or math.inf
    return _divergence(inputs, policy_N, kl).clamp(-bound, bound)


def _divergence(inputs: LossInputs, policy_N: Tensor, kl: KlConfig) -> Tensor:
    assert inputs.reference_N is not None
    return estimate(
        kl.estimator,
        policy_N,
        inputs.reference_N.detach(),
        inputs.rollout_N.detach(),
    )


def _with_kl_penalty(
    inputs: LossInputs, old_N: Tensor, config: AlgorithmConfig
) -> Tensor:
    """Return the advantages [N], with the KL term as a token reward if the settings add
    it here:

        A_t' = A_t - coefficient * sum over s >= t of KL(old_s, reference_s)

    The sum is over the sample's trained tokens, without discount or gradient (Ziegler
    et al. 2019, arXiv 1909.08593, section 2.2, and PPO for language models since). verl
    subtracts the same penalty of the same policy from the rewards before they become
    advantages, so there it also enters the baseline and the division by a deviation;
    here it does not."""
    kl = config.kl
    if kl is None or kl.added_to != "reward" or config.kl_in_token_rewards:
        return inputs.advantages_N
    penalty_N = kl.coefficient * _kl_term(inputs, old_N, kl)
    return inputs.advantages_N - to_go(penalty_N.detach(), inputs.samples)


def _metrics(
    inputs: LossInputs,
    old_N: Tensor,
    correction: Correction,
    config: AlgorithmConfig,
    *,
    means: dict[str, Tensor],
    maxima: dict[str, Tensor],
    sums: Mapping[str, Tensor],
) -> Mapping[str, Metric]:
    """Return the metrics of the axes in addition to `means`, `maxima` and `sums`."""
    rollout_N = inputs.rollout_N
    gap_N = (old_N - rollout_N).abs()
    means = {
        **means,
        "approx_kl": k3(old_N, inputs.current_N),  # the tokens were drawn from old
        "correction_mean": correction.weight_N,
        "correction_capped_fraction": correction.capped_N,
        "logprob_gap_mean": gap_N,
    }
    if config.rejection is not None:
        means["rejected_fraction"] = correction.rejected_N
    if inputs.reference_N is not None:
        means["kl_reference"] = k3(inputs.current_N, inputs.reference_N)
    if inputs.reference_N is not None and config.kl is not None:
        bound = config.kl.clamp or math.inf
        policy_N = inputs.current_N if config.kl.added_to == "loss" else old_N
        estimate_N = _divergence(inputs, policy_N, config.kl)
        means["kl_clamped_fraction"] = estimate_N.abs() > bound
    if inputs.entropy_N is not None:
        means["entropy"] = inputs.entropy_N
    maxima = {**maxima, "logprob_gap_max": gap_N}
    if inputs.after_update_N is not None:
        gaps = gap_N[inputs.after_update_N]
        means["logprob_gap_after_update_mean"] = gaps
        maxima["logprob_gap_after_update_max"] = gaps
    return token_metrics(means, maxima, sums)
