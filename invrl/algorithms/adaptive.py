"""Coefficients of the loss that are adapted after each batch from its measurements, or
learned in each step.

A controller is a function of numbers. Its state is saved with the trainer's checkpoint.
"""

from dataclasses import dataclass, replace

from invrl.algorithms.config import AlgorithmConfig, LengthWeightsConfig
from invrl.types.section import Section

_GAIN = 0.1
"""Ziegler et al.'s K."""
_LARGEST_ERROR = 0.2
_LARGEST_ENTROPY_COEF = 1.0
"""TRL's upper bound."""


def adapted_kl_coef(coef: float, divergence: float, target: float) -> float:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section
    2.2).

        e = clip(KL / target - 1, -0.2, 0.2),    coef <- coef (1 + 0.1 e)

    `divergence` and `target` are in nats per token: the mean of k3 over a batch's
    trained tokens. The paper's are sums over a sequence. verl has the form of the
    paper's code, coef (1 + e n / horizon), with the mean over samples.
    """
    error = divergence / target - 1.0
    error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1.0 + _GAIN * error)


def adapted_entropy_coef(
    coef: float, entropy: float, target: float, step: float
) -> float:
    """Skywork-OR1's coefficient (arXiv 2505.22312, section 3.2.5): it grows by `step`
    after a batch whose mean entropy is below the target and shrinks by it otherwise,
    between 0 and 1 (TRL's bounds)."""
    coef += step if entropy < target else -step
    return min(max(coef, 0.0), _LARGEST_ENTROPY_COEF)


def band_entropy_coef(
    coef: float, entropy: float, low: float, high: float, step: float
) -> float:
    """Keep the entropy between two bounds: ours, after Skywork-OR1's one bound.

        H < low              coef <- max(coef, 0) + step       at most 1: a bonus
        H > high             coef <- min(coef, 0) - step       at least -1: a penalty
        low <= H <= high     coef <- towards 0 by step         does not act

    We know no paper that has both.
    """
    if entropy < low:
        return min(max(coef, 0.0) + step, _LARGEST_ENTROPY_COEF)
    if entropy > high:
        return max(min(coef, 0.0) - step, -_LARGEST_ENTROPY_COEF)
    return coef - min(max(coef, -step), step)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Current values of the adapted coefficients."""

    kl: float
    entropy: float
    entropy_acts: bool
    """Whether the entropy, when it was last measured, was where the coefficient acts:
    at most the target, or outside of the band."""
    length_lambda: float
    """Exponent of the length weights (`length_weights.py`)."""

    @staticmethod
    def of(config: AlgorithmConfig) -> "Coefficients":
        """Return the coefficients at the start of a run."""
        return Coefficients(
            kl=config.kl.coefficient if config.kl else 0.0,
            entropy=config.entropy.coefficient if config.entropy else 0.0,
            entropy_acts=True,
            length_lambda=(
                config.length_weights.exponent if config.length_weights else 0.0
            ),
        )

    def after(
        self, config: AlgorithmConfig, divergence: float, entropy: float
    ) -> "Coefficients":
        """Return the coefficients after a batch with these means over its trained
        tokens, in nats."""
        kl = self.kl
        if config.kl is not None and config.kl.target is not None:
            kl = adapted_kl_coef(kl, divergence, config.kl.target)
        bonus = config.entropy
        if bonus is None:
            return replace(self, kl=kl)
        target = bonus.target
        ceiling = bonus.ceiling
        if ceiling is not None:
            floor = target or 0.0
            adapted = band_entropy_coef(
                self.entropy, entropy, floor, ceiling, bonus.step
            )
            return replace(
                self,
                kl=kl,
                entropy=adapted,
                entropy_acts=not floor <= entropy <= ceiling,
            )
        if target is None:
            return replace(self, kl=kl)
        adapted = adapted_entropy_coef(self.entropy, entropy, target, bonus.step)
        return replace(self, kl=kl, entropy=adapted, entropy_acts=entropy <= target)

    def after_step(
        self, weights: LengthWeightsConfig, lambda_gradient: float
    ) -> "Coefficients":
        """Return the coefficients after an optimizer step of the policy with a learned
        lambda: plain gradient descent on the loss, lambda <- lambda - lr dL/dlambda.

        lambda-GRPO (arXiv 2510.06870) learns it together with the policy and does not
        name the optimizer. `lambda_gradient` is of the whole mini-batch, over all
        ranks.
        """
        return replace(
            self,
            length_lambda=self.length_lambda - weights.lr * lambda_gradient,
        )

    @property
    def acting_entropy(self) -> float:
        """Coefficient of the entropy bonus where it acts, otherwise 0."""
        return self.entropy if self.entropy_acts else 0.0

    def within(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """Return the run's settings with these coefficients. With a target the entropy
        bonus acts only while the entropy is at most the target, with a ceiling only
        outside of the two."""
        tables: dict[str, Section] = {}
        if config.kl is not None:
            tables["kl"] = config.kl.model_copy(update={"coefficient": self.kl})
        if config.entropy is not None:
            changed = {"coefficient": self.acting_entropy}
            tables["entropy"] = config.entropy.model_copy(update=changed)
        return config.model_copy(update=tables)
