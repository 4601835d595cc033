"""lambda-GRPO: rollouts count by their length within their group (arXiv 2510.06870).

`--sample-weight invrl.contrib.lambda_grpo:LengthWeight --plugin.LengthWeight.exponent
1` has a fixed exponent lambda; with `--adaptations
invrl.contrib.lambda_grpo:LearnedExponent` it is learned, as in the preset
`lambda_grpo`. The weights are a factor on top of the aggregation, with one exponent for
the whole run. NumPy in float64, so every rank computes the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat

from invrl.errors import ConfigError
from invrl.types.batches import TrainedCounts
from invrl.types.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from invrl.algorithms.config import AlgorithmConfig
    from invrl.algorithms.loss_inputs import LossInputs, SampleWeights
    from invrl.run.settings.config import Config

LENGTH_WEIGHT = "length_weight"
"""Number of a sample that multiplies its token losses."""
LENGTH_SLOPE = "length_slope"
"""Derivative of that number with respect to lambda."""
LAMBDA_GRADIENT = "length_lambda_gradient"
"""Metric of a micro-batch: its part of dL/dlambda."""
_LAMBDA = "length_lambda"
_LARGEST_EXPONENT = 100.0
_EPS = 1e-8
"""Added to the deviation of the lengths."""
_SMALLEST_BASE = 1e-6
"""Replaces an h_i that is not above 0, whose power would not be a number."""
_LARGEST_LOG_POWER = 50.0
"""Bound of h_i^lambda. Above it the softmax is 1 for one rollout and 0 for the
others."""


def largest_scale(group_size: int) -> float:
    """Smallest r at which a rollout of such a group may have h_i = 0: sqrt(G) / (G -
    1), because no z_i is below -(G - 1) / sqrt(G). `group_size` is 2 or more."""
    return float(np.sqrt(group_size)) / (group_size - 1)


def group_weights(
    lengths_G: NDArray[np.float64], exponent: float, scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weights f_i [G] of a group's rollouts, whose mean is 1, and their derivatives
    df_i/dlambda [G].

        z_i = (|o_i| - mean_j |o_j|) / (std_j |o_j| + 1e-8)
        h_i = 1 + r z_i
        f_i = G exp(h_i^lambda) / sum_j exp(h_j^lambda)

    `lengths_G`: |o_i|, in trained tokens; `exponent`: lambda; `scale`: r. With lambda =
    0, in a group of one and among equal lengths every weight is exactly 1. With lambda
    above 0 long rollouts count more, below 0 short ones.

    lambda-GRPO (arXiv 2510.06870, section 2.3, as reviews and the reimplementation
    grpo-composer give it). The deviation is the sample's (G - 1), as in grpo-composer,
    whose softmax is the same but has no bounds.
    """
    num_rollouts = len(lengths_G)
    deviation = lengths_G.std(ddof=1) if num_rollouts > 1 else 0.0
    z_G = (lengths_G - lengths_G.mean()) / (deviation + _EPS)
    log_h_G = np.log((1.0 + scale * z_G).clip(min=_SMALLEST_BASE))
    power_G = np.exp((exponent * log_h_G).clip(max=_LARGEST_LOG_POWER))
    exp_G = np.exp(power_G - power_G.max())
    weights_G = exp_G / exp_G.mean()
    power_slopes_G = power_G * log_h_G
    slopes_G = weights_G * (power_slopes_G - (weights_G * power_slopes_G).mean())
    return weights_G, slopes_G


class LengthWeight(Section):
    """A softmax of (1 + r z)^lambda with the standardized length z, times the group's
    size."""

    exponent: float = Field(
        0.0,
        description="lambda, at the start if it is learned: above 0 long rollouts count more, below 0 short "
        "ones; 0: all alike. The paper does not say where it starts",
    )
    scale: PositiveFloat = Field(
        1 / 9, description="r, how far a deviation of the length moves 1 + r z from 1"
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError where every weight would be 1, or an h_i may have no
        power."""
        samples = config.rollout.n_samples_per_prompt
        if samples == 1:
            reason = "lengths are compared within a group; with one rollout every weight is 1"
            fix = "set --n-samples-per-prompt to 2 or more"
            raise ConfigError("rollout.n_samples_per_prompt", samples, reason, fix)
        bound = largest_scale(samples)
        if self.scale >= bound:
            reason = (
                f"in a group of {samples} a rollout may be so short that 1 + r z is not above 0, and has no "
                "power"
            )
            fix = f"set it below {bound:.4g}"
            raise ConfigError("plugin.LengthWeight.scale", self.scale, reason, fix)
        if abs(self.exponent) > _LARGEST_EXPONENT:
            reason = (
                f"one rollout of a group would count alone above {_LARGEST_EXPONENT:g}"
            )
            raise ConfigError(
                "plugin.LengthWeight.exponent", self.exponent, reason, "lower it"
            )
        if not self.exponent and not config.algorithm.adaptations:
            reason = "with an exponent of 0 that is not learned every weight is 1"
            fix = (
                "set --plugin.LengthWeight.exponent, or add "
                "--adaptations invrl.contrib.lambda_grpo:LearnedExponent"
            )
            raise ConfigError(
                "plugin.LengthWeight.exponent", self.exponent, reason, fix
            )

    def numbers(self, trained: TrainedCounts) -> Mapping[str, Mapping[str, float]]:
        """Return the numbers `LENGTH_WEIGHT` and `LENGTH_SLOPE` of each rollout with a
        trained token, by rollout id.

        A rollout counts once, with the trained tokens of all its samples. A mini-batch
        holds whole groups, so `trained` suffices, whatever ranks the samples are on.
        """
        rollouts_of_group: dict[str, list[str]] = {}
        for rollout_id, group_id in trained.group_of_rollout.items():
            rollouts_of_group.setdefault(group_id, []).append(rollout_id)
        numbers: dict[str, Mapping[str, float]] = {}
        for rollout_ids in rollouts_of_group.values():
            lengths_G = np.array(
                [trained.tokens_of_rollout[rollout_id] for rollout_id in rollout_ids],
                np.float64,
            )
            weights_G, slopes_G = group_weights(lengths_G, self.exponent, self.scale)
            for rollout_id, weight, slope in zip(
                rollout_ids, weights_G, slopes_G, strict=True
            ):
                numbers[rollout_id] = {
                    LENGTH_WEIGHT: float(weight),
                    LENGTH_SLOPE: float(slope),
                }
        return numbers

    def __call__(
        self, inputs: LossInputs, weight_R: Tensor, losses_N: Tensor
    ) -> SampleWeights:
        """Return the aggregation's weights times the rollouts' length weights f, and
        the micro-batch's part of

            dL/dlambda = sum_t a_t l_t df_t/dlambda

        in which only f depends on lambda. All terms of a token's loss are weighted.
        """
        from invrl.algorithms.loss_inputs import SampleWeights

        slope_R = weight_R * inputs.numbers[LENGTH_SLOPE]
        slope_N = inputs.samples.spread(slope_R).double()
        gradient = (slope_N * losses_N.double()).sum()
        return SampleWeights(
            weights_R=weight_R * inputs.numbers[LENGTH_WEIGHT],
            sums={LAMBDA_GRADIENT: gradient},
        )


class LearnedExponent(Section):
    """Learns lambda with the policy: plain gradient descent on the loss in each
    optimizer step, lambda <- lambda - lr dL/dlambda.

    lambda-GRPO does not name the optimizer.
    """

    after_each: ClassVar[Literal["batch", "optimizer_step"]] = "optimizer_step"
    means: ClassVar = ()
    sums: ClassVar = (LAMBDA_GRADIENT,)
    lr: PositiveFloat = Field(
        description="learning rate of lambda. The paper does not give one"
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError without length weights."""
        name = config.algorithm.sample_weight
        if name is None or not name.endswith(f":{LengthWeight.__name__}"):
            reason = "there is no exponent that could be learned"
            fix = "set --sample-weight invrl.contrib.lambda_grpo:LengthWeight"
            raise ConfigError("algorithm.sample_weight", name, reason, fix)

    def start(self, algorithm: AlgorithmConfig) -> Mapping[str, float]:
        """Return the exponent of the settings."""
        table = algorithm.plugin.by_name.get(LengthWeight.__name__, {})
        return {_LAMBDA: LengthWeight.model_validate(table).exponent}

    def __call__(
        self, state: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the exponent after an optimizer step of the policy."""
        return {_LAMBDA: state[_LAMBDA] - self.lr * measured[LAMBDA_GRADIENT]}

    def within(
        self, algorithm: AlgorithmConfig, state: Mapping[str, float]
    ) -> AlgorithmConfig:
        """Return the settings with the exponent."""
        return algorithm.with_plugin_table(
            LengthWeight.__name__, {"exponent": state[_LAMBDA]}
        )
