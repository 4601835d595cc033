"""A coefficient of the entropy bonus that is adapted after each batch.

`--adaptations invrl.contrib.adaptive_entropy:AdaptiveEntropy
--plugin.AdaptiveEntropy.target 0.2`. `--entropy.coefficient` is what the coefficient
begins with; without it 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.tables import EntropyConfig
from invrl.types.section import Section

_ACTING = "entropy_coef"
_OUTSIDE = "entropy_coef_outside"
"""The coefficient where the bonus or the penalty acts, also while it does not."""
_ENTROPY = "entropy"
_LARGEST = 1.0
"""TRL's upper bound."""


def adapted_coefficient(
    coefficient: float, entropy: float, target: float, step: float
) -> float:
    """Skywork-OR1's coefficient (arXiv 2505.22312, section 3.2.5): it grows by `step`
    after a batch whose mean entropy is below the target and shrinks by it otherwise,
    between 0 and 1 (TRL's bounds)."""
    coefficient += step if entropy < target else -step
    return min(max(coefficient, 0.0), _LARGEST)


def coefficient_of_band(
    coefficient: float, entropy: float, low: float, high: float, step: float
) -> float:
    """Keep the entropy between two bounds: ours, after Skywork-OR1's one bound.

        H < low              coef <- max(coef, 0) + step       at most 1: a bonus
        H > high             coef <- min(coef, 0) - step       at least -1: a penalty
        low <= H <= high     coef <- towards 0 by step         does not act

    We know no paper that has both.
    """
    if entropy < low:
        return min(max(coefficient, 0.0) + step, _LARGEST)
    if entropy > high:
        return max(min(coefficient, 0.0) - step, -_LARGEST)
    return coefficient - min(max(coefficient, -step), step)


class AdaptiveEntropy(Section):
    """Adapts the coefficient of the entropy bonus. With a target alone the bonus acts
    while the entropy is at most the target, with a ceiling outside of the two."""

    after_each: ClassVar[Literal["batch", "optimizer_step"]] = "batch"
    means: ClassVar = (_ENTROPY,)
    sums: ClassVar = ()
    target: PositiveFloat | None = Field(
        None, description="entropy in nats above which there is no bonus"
    )
    ceiling: PositiveFloat | None = Field(
        None,
        description="entropy in nats above which the coefficient becomes a penalty; between the target and "
        "this nothing acts",
    )
    step: PositiveFloat = Field(
        0.005, description="by how much a batch changes the coefficient"
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> AdaptiveEntropy:
        if self.target is None and self.ceiling is None:
            raise ValueError("there is neither a target nor a ceiling: set one of them")
        if self.ceiling is not None and self.ceiling <= (self.target or 0.0):
            raise ValueError(
                f"the ceiling is not above the target {self.target:g}, the other end of the band"
            )
        return self

    def start(self, algorithm: AlgorithmConfig) -> Mapping[str, float]:
        """Return the coefficient of the settings, which acts."""
        coefficient = algorithm.entropy.coefficient if algorithm.entropy else 0.0
        return {_ACTING: coefficient, _OUTSIDE: coefficient}

    def __call__(
        self, state: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the coefficient after a batch, and what of it acts."""
        entropy = measured[_ENTROPY]
        before = state[_OUTSIDE]
        floor = self.target or 0.0
        if self.ceiling is None:
            coefficient = adapted_coefficient(before, entropy, floor, self.step)
            acts = entropy <= floor
        else:
            coefficient = coefficient_of_band(
                before, entropy, floor, self.ceiling, self.step
            )
            acts = not floor <= entropy <= self.ceiling
        return {_ACTING: coefficient if acts else 0.0, _OUTSIDE: coefficient}

    def within(
        self, algorithm: AlgorithmConfig, state: Mapping[str, float]
    ) -> AlgorithmConfig:
        """Return the settings with the coefficient that acts; a penalty is below 0."""
        entropy = EntropyConfig.model_construct(coefficient=state[_ACTING])
        return algorithm.model_copy(update={"entropy": entropy})
