"""The policy loss of one micro-batch: here the axes meet.

There are three policies: *rollout* (the one with which the engine sampled), *old* (the proximal policy) and
*current* (the one with a gradient). Clipping acts on current/old, the correction on old/rollout:

    loss = sum_t a_t [ w_t * surrogate(r_t, A_t) + kl_coef * min(k3(current_t || reference_t), kl_clamp) ]

    r_t = current_t / old_t         ratios.py
    surrogate                       surrogates.py
    w_t from old_t / rollout_t      corrections.py
    k3                              kl.py
    a_t                             aggregation.py
    A_t                             advantages.py, computed when the batch is taken

No single token can dominate a step: log-ratios are clamped before exp (`ratios.py`), k3 is bounded by
`kl_clamp`, and the surrogate `clip` has a dual clip.

Invariant: the sum of `loss` over micro-batches and ranks, and of its gradient, does not depend on how the
tokens were split.
"""

import math

import torch

from invrl.algorithms.aggregation import AGGREGATIONS
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.corrections import CORRECTIONS
from invrl.algorithms.kl import k3
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs, token_metrics
from invrl.algorithms.ratios import RATIOS
from invrl.algorithms.surrogates import CLIP, clipped_tokens, surrogate_function


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The loss in the module's docstring.

    Raises ValueError for kl_coef > 0 without reference log-probs, PluginError for a surrogate that cannot be
    loaded.
    """
    current_N = inputs.current_N
    rollout_N = inputs.rollout_N.detach()
    if config.old_logprobs == "engine":
        old_N = rollout_N
    elif inputs.old_N is not None:
        old_N = inputs.old_N.detach()
    else:
        old_N = current_N.detach()
    advantages_N = inputs.advantages_N

    surrogate = surrogate_function(config.policy_loss)
    is_clip = config.policy_loss == CLIP
    bounds = {"eps_clip_low": config.eps_clip_low, "eps_clip_high": config.eps_clip_high}
    if is_clip:  # the only surrogate with a dual clip
        bounds["dual_clip"] = config.dual_clip
    ratio_N = RATIOS[config.ratio_level](current_N, old_N)
    correction = CORRECTIONS[config.correction](old_N, rollout_N, config.correction_cap)
    surrogate_N = surrogate(ratio_N, advantages_N, **bounds)
    losses_N = correction.weight_N * surrogate_N

    kl_N = None
    if inputs.reference_N is not None:
        kl_N = k3(current_N, inputs.reference_N.detach())
    kl_bound = config.kl_clamp or math.inf
    if config.kl_coef:
        if kl_N is None:
            raise ValueError(f"kl_coef is {config.kl_coef} but there are no reference log-probs")
        losses_N = losses_N + config.kl_coef * kl_N.clamp(max=kl_bound)
    aggregation = AGGREGATIONS[config.aggregation]
    weight_R = aggregation(inputs.rows, inputs.denominators, config.aggregation_constant)
    loss = (inputs.rows.spread(weight_R) * losses_N).sum()

    with torch.no_grad():
        gap_N = (old_N - rollout_N).abs()
        means = {
            "loss": losses_N,
            "ratio_mean": ratio_N,
            "approx_kl": k3(old_N, current_N),  # the tokens were drawn from old
            "correction_mean": correction.weight_N,
            "correction_capped_fraction": correction.capped_N,
            "logprob_gap_mean": gap_N,
        }
        if is_clip:
            clipped = clipped_tokens(ratio_N, advantages_N, **bounds)
            means["clip_fraction"] = clipped.any_N
            means["clip_fraction_low"] = clipped.low_N
            means["clip_fraction_high"] = clipped.high_N
            means["clip_fraction_dual"] = clipped.dual_N
        if kl_N is not None:
            means["kl_reference"] = kl_N
            means["kl_clamped_fraction"] = kl_N > kl_bound
        if inputs.entropy_N is not None:
            means["entropy"] = inputs.entropy_N
        maxima = {"ratio_max": ratio_N, "logprob_gap_max": gap_N}
        metrics = token_metrics(means, maxima)
        if inputs.after_update_N is not None:
            gaps = gap_N[inputs.after_update_N]
            spanning = token_metrics({"mean": gaps}, {"max": gaps})
            metrics |= {f"logprob_gap_after_update_{name}": metric for name, metric in spanning.items()}
        return LossOutputs(loss=loss, metrics=metrics)
