"""The policy loss of one micro-batch: the axes put together.

Three policies, never confused: *rollout* (what the engine sampled with), *old* (the proximal policy),
*current* (the one with a gradient). Clipping is on current/old, the correction on old/rollout:

    loss = 1/D  sum_t [ w_t * surrogate(r_t, A_t) + kl_coef * min(k3(current_t || reference_t), kl_clamp) ]

with r = current/old, w from `corrections`, D the global trained-token count. No token can own a step:
log-ratios are clamped before exp (`ratios.py`), k3 at `kl_clamp`, and the surrogate `clip` has a dual clip.

Invariant: the sum of `loss` over micro-batches and ranks, and of its gradient, does not depend on how the
tokens were split."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from invrl.algorithms.aggregation import AGGREGATIONS
from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.corrections import CORRECTIONS
from invrl.algorithms.kl import k3
from invrl.algorithms.ratios import RATIOS
from invrl.algorithms.surrogates import CLIP, clipped_tokens, surrogate_function
from invrl.metrics import Max, Mean, Metric


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """The trained tokens of one micro-batch, flat: float32 [N] each, log-probs in nats at the sampling
    temperature. N may be 0. Only `current_N` carries a gradient; `old_N` None: the same numbers; the frozen
    reference is needed when kl_coef > 0; the entropy, of the current distribution, is for the metrics.
    `denominator`: trained tokens of the whole mini-batch, over all micro-batches and ranks."""

    current_N: Tensor
    old_N: Tensor | None
    rollout_N: Tensor
    advantages_N: Tensor
    reference_N: Tensor | None
    entropy_N: Tensor | None
    denominator: float

    def __post_init__(self) -> None:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name.endswith("_N")}
        shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
        if len(set(shapes.values())) != 1 or self.current_N.dim() != 1:
            raise ValueError(f"loss inputs are not all of one shape [N]: {shapes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutputs:
    """A scalar to call backward on, and metrics to merge over micro-batches, ranks and steps."""

    loss: Tensor
    metrics: Mapping[str, Metric]


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutputs:
    """The loss above. Raises ValueError for kl_coef > 0 without reference log-probs, or a denominator below
    N, PluginError for a surrogate that cannot be loaded."""
    surrogate = surrogate_function(config.policy_loss)
    old_N = (inputs.current_N if inputs.old_N is None else inputs.old_N).detach()
    rollout_N = inputs.rollout_N.detach()
    clips = config.policy_loss == CLIP
    bounds = {"eps_clip_low": config.eps_clip_low, "eps_clip_high": config.eps_clip_high}
    if clips:
        bounds["dual_clip"] = config.dual_clip
    ratio_N = RATIOS[config.ratio_level](inputs.current_N, old_N)
    correction = CORRECTIONS[config.correction](old_N, rollout_N, config.correction_cap)
    losses_N = correction.weight_N * surrogate(ratio_N, inputs.advantages_N, **bounds)
    kl_N = None if inputs.reference_N is None else k3(inputs.current_N, inputs.reference_N.detach())
    if config.kl_coef:
        if kl_N is None:
            raise ValueError(f"kl_coef is {config.kl_coef} but there are no reference log-probs")
        bounded_kl_N = kl_N.clamp(max=config.kl_clamp) if config.kl_clamp else kl_N
        losses_N = losses_N + config.kl_coef * bounded_kl_N
    loss = AGGREGATIONS[config.aggregation](losses_N, inputs.denominator)

    with torch.no_grad():
        gap_N = (old_N - rollout_N).abs()
        means = {
            "loss": losses_N,
            "ratio_mean": ratio_N,
            "approx_kl": k3(old_N, inputs.current_N),  # the tokens were drawn from old
            "correction_mean": correction.weight_N,
            "correction_capped_fraction": correction.capped_N,
            "logprob_gap_mean": gap_N,
        }
        if clips:
            clipped = clipped_tokens(ratio_N, inputs.advantages_N, **bounds)
            means["clip_fraction"] = clipped.any_N
            means["clip_fraction_low"] = clipped.low_N
            means["clip_fraction_high"] = clipped.high_N
            means["clip_fraction_dual"] = clipped.dual_N
        if kl_N is not None:
            means["kl_reference"] = kl_N
            means["kl_clamped_fraction"] = kl_N > (config.kl_clamp or math.inf)
        if inputs.entropy_N is not None:
            means["entropy"] = inputs.entropy_N
        maxima = {"ratio_max": ratio_N, "logprob_gap_max": gap_N}
        return LossOutputs(loss=loss, metrics=_metrics(means, maxima))


def _metrics(means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> dict[str, Metric]:
    """One transfer to the host for all of them. Maxima are of numbers >= 0, so none at all gives 0."""
    count = next(iter(means.values())).numel()
    sums = [tensor.detach().double().sum() for tensor in means.values()]
    most = [torch.cat([t.detach().double(), t.new_zeros(1).double()]).max() for t in maxima.values()]
    numbers = torch.stack(sums + most).tolist()
    metrics = [*(Mean(total, count) for total in numbers[: len(means)]), *map(Max, numbers[len(means) :])]
    return dict(zip([*means, *maxima], metrics, strict=True))
