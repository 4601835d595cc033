"""Policy losses: the loss of one token from its ratio current/old and its advantage.

A built-in reads `PolicyLossInputs`, and so does a user's `MeasuredPolicyLoss`. A user's
`PolicyLoss` gets ratio and advantage, and with the keyword `inputs` also the
LossInputs.

This module does not import torch: the driver checks the setting with it and never holds
a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from invrl.algorithms.policy_loss.ratios import LOG_RATIO_BOUND
from invrl.errors import PluginError
from invrl.interfaces import MeasuredPolicyLoss, PolicyLoss
from invrl.user_code.plugins import accepts_call, load_plugin

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.config import AlgorithmConfig
    from invrl.algorithms.loss_inputs import LossInputs

LEAST_PROBABILITY = 1e-8
"""Lower bound of the probability of all other tokens together, in `dppo_kl`, as in the
authors' code."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLossInputs:
    """Inputs of a policy loss: tensors [N] of the trained tokens of one micro-batch."""

    ratio_N: Tensor
    """current/old at the setting's `ratio_level`, with its gradient."""
    advantages_N: Tensor
    """Without gradient."""
    inputs: LossInputs
    """The log-probs of all policies, the samples, the user's columns and numbers."""
    config: AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLosses:
    """Output of a policy loss."""

    losses_N: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)
    """[N] each, bool or float: the metric of that name is the mean over the tokens."""


BuiltInPolicyLoss = Callable[[PolicyLossInputs], TokenLosses]


def clip(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7), per token: [N], [N] -> [N].

        L = -min(r A, clamp(r, 1 - low, 1 + high) A)

    The two bounds are separate settings, as in DAPO's clip-higher (arXiv 2503.14476,
    section 3.1).

    Where A < 0 this has no upper bound in r. With `dual_clip` c the loss of such a
    token is at most -c A (dual-clip PPO, Ye et al. 2020, arXiv 1912.09729, eq. 5). 0
    means no such bound.
    """
    clipped_N = ratio_N.clamp(1.0 - eps_clip_low, 1.0 + eps_clip_high)
    objective_N = ratio_N * advantages_N
    clipped_objective_N = clipped_N * advantages_N
    losses_N = -objective_N.minimum(clipped_objective_N)
    if not dual_clip:
        return losses_N
    bounded_N = losses_N.minimum(-dual_clip * advantages_N)
    return bounded_N.where(advantages_N < 0, losses_N)


def clip_fractions(low_N: Tensor, high_N: Tensor) -> dict[str, Tensor]:
    """Return the tokens that lose their gradient at a lower and an upper bound, bool
    [N] each, as means."""
    return {
        "clip_fraction": low_N | high_N,
        "clip_fraction_low": low_N,
        "clip_fraction_high": high_N,
    }


def clipped_tokens(
    ratio_N: Tensor,
    advantages_N: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    dual_clip: float | None,
) -> dict[str, Tensor]:
    """Find the tokens that `clip` takes out of the gradient with these settings, as
    `clip_fractions`. A ratio on a bound is not clipped."""
    low_N = (ratio_N < 1.0 - eps_clip_low) & (advantages_N < 0)
    high_N = (ratio_N > 1.0 + eps_clip_high) & (advantages_N > 0)
    dual_N = (ratio_N > (dual_clip or float("inf"))) & (advantages_N < 0)
    return {
        **clip_fractions(low_N, high_N),
        "clip_fraction": low_N | high_N | dual_N,
        "clip_fraction_dual": dual_N,
    }


def clipped_losses(of: PolicyLossInputs) -> TokenLosses:
    """Apply `clip` with the settings, and measure what it clipped."""
    config = of.config
    losses_N = clip(
        of.ratio_N,
        of.advantages_N,
        eps_clip_low=config.eps_clip_low,
        eps_clip_high=config.eps_clip_high,
        dual_clip=config.dual_clip,
    )
    means = clipped_tokens(
        of.ratio_N.detach(),
        of.advantages_N,
        eps_clip_low=config.eps_clip_low,
        eps_clip_high=config.eps_clip_high,
        dual_clip=config.dual_clip,
    )
    return TokenLosses(losses_N=losses_N, means=means)


def cispo(of: PolicyLossInputs) -> TokenLosses:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): [N] -> [N].

        L = -sg[clamp(r, 1 - eps_clip_low, 1 + eps_clip_high)] A log p

    The ratio is bounded and no token loses its gradient. The paper has no lower bound
    in effect: `eps_clip_low` of 1 or more. verl's `cispo` is the same. TRL's has the
    upper bound only, and its `epsilon_high` is the bound itself, 1 + our
    `eps_clip_high`.
    """
    ratio_N = of.ratio_N.detach()
    lowest = 1.0 - of.config.eps_clip_low
    highest = 1.0 + of.config.eps_clip_high
    losses_N = -ratio_N.clamp(lowest, highest) * of.advantages_N * of.inputs.current_N
    means = clip_fractions(ratio_N < lowest, ratio_N > highest)
    return TokenLosses(losses_N=losses_N, means=means)


def sapo(of: PolicyLossInputs) -> TokenLosses:
    """SAPO's soft gate (arXiv 2511.20347, eq. 5 and 6): [N] -> [N].

        L = -(4 / tau) sigmoid(tau (r - 1)) A

    tau is `sapo.temperature_positive` where A > 0, else `sapo.temperature_negative`.
    The slope in r is 1 at r = 1 and falls smoothly on both sides. Nothing is clipped.
    TRL's `sapo` and verl's have the same token losses; both then take the mean over
    samples of each sample's mean.
    """
    settings = of.config.sapo
    assert settings is not None
    temperature_N = _chosen(
        of.advantages_N > 0,
        settings.temperature_positive,
        settings.temperature_negative,
        like_N=of.advantages_N,
    )
    gate_N = (temperature_N * (of.ratio_N - 1.0)).sigmoid() * 4.0 / temperature_N
    return TokenLosses(losses_N=-gate_N * of.advantages_N)


def rejection_gate(of: PolicyLossInputs) -> TokenLosses:
    """Rejection-gated policy optimization (arXiv 2604.14895): [N] -> [N].

        L = -g(r) A,    g(r) = sigmoid(k (r - 1)),    k = `rejection_gate.sharpness`

    The gradient of a token's log-prob is weighted by w(r) = g'(r) r, which is bounded
    in r and falls to 0 on both sides. The paper's abstract has the gate, a smooth
    function of r in [0, 1], and w. It only says that the sigmoid has a sharpness k; the
    centre r = 1, and k = 4, with which w(1) = 1, are ours. The paper's second gate, on
    current/reference for preferences, is not implemented.
    """
    settings = of.config.rejection_gate
    assert settings is not None
    gate_N = (settings.sharpness * (of.ratio_N - 1.0)).sigmoid()
    return TokenLosses(
        losses_N=-gate_N * of.advantages_N, means={"rejection_gate_mean": gate_N}
    )


def gmpo(of: PolicyLossInputs) -> TokenLosses:
    """GMPO's geometric mean of clipped ratios (arXiv 2507.20673): [N] -> [N].

        L = -A exp( mean over the sample of c_t ),    c_t = min(log r_t, eps_clip_high) where A_t > 0,
                                                         max(log r_t, -eps_clip_low) where A_t < 0

    All tokens of a sample have the same ratio; each is clipped separately before the
    mean. The paper's bounds e^-0.4 and e^0.4 are 0.4 here. A token with advantage 0 has
    c_t = 0. With the aggregation `sequence_mean` the loss is verl's `geo_mean`, where
    the formula was read."""
    log_ratio_N = of.ratio_N.log()
    low_N = (log_ratio_N < -of.config.eps_clip_low) & (of.advantages_N < 0)
    high_N = (log_ratio_N > of.config.eps_clip_high) & (of.advantages_N > 0)
    clipped_N = log_ratio_N.masked_fill(low_N, -of.config.eps_clip_low)
    clipped_N = clipped_N.masked_fill(high_N, of.config.eps_clip_high)
    clipped_N = clipped_N.masked_fill(of.advantages_N == 0, 0.0)
    samples = of.inputs.samples
    ratio_N = samples.spread(samples.mean(clipped_N).exp())
    means = {**clip_fractions(low_N, high_N), "row_ratio_mean": ratio_N}
    return TokenLosses(losses_N=-ratio_N * of.advantages_N, means=means)


def policy_gradient(of: PolicyLossInputs) -> TokenLosses:
    """The plain policy gradient (REINFORCE, Williams 1992): [N] -> [N].

        L = -A log p

    There is no ratio to clip. The off-policy correction makes it the gradient of the
    old policy's objective.
    """
    return TokenLosses(losses_N=-of.advantages_N * of.inputs.current_N)


def dppo_tv(of: PolicyLossInputs) -> TokenLosses:
    """DPPO with the binary total variation (arXiv 2602.04879, eq. 12 and 13): [N] ->
    [N].

        L = -M r A,    M = 0 where |p - q| > dppo.threshold and the update would go further from q, else 1

    p is the token's probability under the current policy and q under the one that
    sampled it: the paper (section 5.2) anchors the trust region there and not at
    recomputed log-probs. "Further" means p > q with A > 0, or p < q with A < 0. The
    paper's r is p/q, which is ours with `old_logprobs` engine; otherwise r is
    current/old and the correction gives the rest. Unlike verl and the authors' code we
    do not truncate r below e^20: section 5.4 found that it hurts.
    """
    inputs = of.inputs
    current_N = inputs.current_N.detach()
    distance_N = (current_N.exp() - inputs.rollout_N.exp()).abs()
    return masked_by_distance(of, distance_N, _threshold(of))


def dppo_kl(of: PolicyLossInputs) -> TokenLosses:
    """DPPO with the binary KL divergence (arXiv 2602.04879, eq. 12 and 14): as
    `dppo_tv`, with

        D = q log(q / p) + (1 - q) log((1 - q) / (1 - p))

    instead of |p - q|. 1 - q and 1 - p are at least 1e-8, as in the authors' code.
    """
    inputs = of.inputs
    current_N = inputs.current_N.detach()
    rollout_N = inputs.rollout_N
    others_current_N = (-current_N.expm1()).clamp(min=LEAST_PROBABILITY)
    others_rollout_N = (-rollout_N.expm1()).clamp(min=LEAST_PROBABILITY)
    of_token_N = rollout_N.exp() * (rollout_N - current_N)
    of_others_N = others_rollout_N * (others_rollout_N.log() - others_current_N.log())
    return masked_by_distance(of, of_token_N + of_others_N, _threshold(of))


def _threshold(of: PolicyLossInputs) -> float:
    assert of.config.dppo is not None
    return of.config.dppo.threshold


def masked_by_distance(
    of: PolicyLossInputs, distance_N: Tensor, threshold: float
) -> TokenLosses:
    """Apply DPPO's mask (eq. 12) for a distance of the current policy from the sampling
    one."""
    further_N = of.inputs.current_N.detach() - of.inputs.rollout_N
    far_N = distance_N > threshold
    high_N = far_N & (further_N > 0) & (of.advantages_N > 0)
    low_N = far_N & (further_N < 0) & (of.advantages_N < 0)
    losses_N = -(of.ratio_N * of.advantages_N).masked_fill(high_N | low_N, 0.0)
    return TokenLosses(losses_N=losses_N, means=clip_fractions(low_N, high_N))


def vespo(of: PolicyLossInputs) -> TokenLosses:
    """VESPO's soft weight of whole samples (arXiv 2602.10693, eq. 20): [N] -> [N].

        L = -sg[phi(W)] A log p,    phi(W) = W^c1 exp(c2 (1 - W)),    W = product of current/rollout

    c1 and c2 are `vespo.power_positive` and `vespo.decay_positive` where A >= 0, else
    `..._negative` (section 4.1: 2 and 3, else 3 and 2). The weight is part of
    the policy loss because it goes from the sampling policy to the current one, so no
    other correction is applied. W is not normalized by length; its logarithm is
    clamped at `ratios.LOG_RATIO_BOUND`, as in the authors' code. TRL multiplies W by
    its correction of the engine; here W has the engine's own log-probs.
    """
    inputs = of.inputs
    settings = of.config.vespo
    assert settings is not None
    samples = inputs.samples
    log_weight_R = samples.sum(inputs.current_N.detach() - inputs.rollout_N)
    log_weight_N = samples.spread(log_weight_R.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    positive_N = of.advantages_N >= 0
    power_N = _chosen(
        positive_N,
        settings.power_positive,
        settings.power_negative,
        like_N=log_weight_N,
    )
    decay_N = _chosen(
        positive_N,
        settings.decay_positive,
        settings.decay_negative,
        like_N=log_weight_N,
    )
    phi_N = (power_N * log_weight_N + decay_N * (1.0 - log_weight_N.exp())).exp()
    losses_N = -phi_N * of.advantages_N * inputs.current_N
    return TokenLosses(losses_N=losses_N, means={"vespo_weight_mean": phi_N})


def _chosen(
    condition_N: Tensor, where_true: float, elsewhere: float, *, like_N: Tensor
) -> Tensor:
    """Return one number where the condition holds and the other elsewhere, in the dtype
    of `like_N`."""
    return like_N.new_full(like_N.shape, elsewhere).masked_fill(condition_N, where_true)


CLIP = "clip"
POLICY_LOSSES: dict[str, BuiltInPolicyLoss] = {
    CLIP: clipped_losses,
    "cispo": cispo,
    "sapo": sapo,
    "rejection_gate": rejection_gate,
    "gmpo": gmpo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
    "policy_gradient": policy_gradient,
}


def policy_loss_function(config: AlgorithmConfig) -> BuiltInPolicyLoss:
    """Return the built-in that the settings name, or the user's policy loss at
    `module:name`. Raises PluginError."""
    name = config.policy_loss
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    return partial(_user_policy_loss, name, load_policy_loss(config))


def load_policy_loss(config: AlgorithmConfig) -> PolicyLoss | MeasuredPolicyLoss:
    """Load the user's policy loss, in either form. Raises PluginError."""
    return load_plugin(
        config.policy_loss,
        "policy_loss",
        PolicyLoss,
        names=tuple(POLICY_LOSSES),
        tables=config.plugin.by_name,
        or_as=MeasuredPolicyLoss,
    )


def takes_inputs(function: PolicyLoss) -> bool:
    """Whether a user's function has the keyword `inputs`, for the LossInputs."""
    try:
        return "inputs" in inspect.signature(function).parameters
    except ValueError:  # a C function without a signature
        return False


def _user_policy_loss(
    name: str, function: PolicyLoss | MeasuredPolicyLoss, of: PolicyLossInputs
) -> TokenLosses:
    """Call the user's function. Raises PluginError unless it returns token losses that
    can be trained."""
    losses = _called(function, of)
    means: Mapping[str, Tensor] = {}
    if isinstance(losses, TokenLosses):
        means = losses.means
        losses = losses.losses_N
    shape = list(of.ratio_N.shape)
    fix = f"return one loss per token, a tensor of shape {shape}, computed from ratio_N"
    if not hasattr(losses, "requires_grad"):
        reason = f"it returned {type(losses).__name__}, not a tensor"
        raise PluginError("policy_loss", name, reason, fix)
    losses_N = cast("Tensor", losses)
    if losses_N.shape != of.ratio_N.shape:
        reason = f"it returned a tensor of shape {list(losses_N.shape)} for {shape[0]} tokens"
        raise PluginError("policy_loss", name, reason, fix)
    if not losses_N.requires_grad:
        reason = "what it returned does not depend on the model: it has no gradient"
        raise PluginError("policy_loss", name, reason, fix)
    return TokenLosses(losses_N=losses_N, means=means)


def _called(function: PolicyLoss | MeasuredPolicyLoss, of: PolicyLossInputs) -> object:
    call = cast("Callable[..., object]", function)
    if not accepts_call(function, PolicyLoss):
        return call(of)
    if takes_inputs(cast(PolicyLoss, function)):
        call = partial(call, inputs=of.inputs)
    return call(
        of.ratio_N,
        of.advantages_N,
        eps_clip_low=of.config.eps_clip_low,
        eps_clip_high=of.config.eps_clip_high,
    )
