"""A coefficient of the KL that is adapted after each batch, towards a target.

`--adaptations invrl.contrib.adaptive_kl:AdaptiveKL --plugin.AdaptiveKL.target 0.05`,
with `--kl.coefficient`, which the coefficient begins with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from invrl.errors import ConfigError
from invrl.types.section import Section

if TYPE_CHECKING:
    from invrl.algorithms.config import AlgorithmConfig
    from invrl.run.settings.config import Config

_COEFFICIENT = "kl_coef"
_DIVERGENCE = "kl_reference"
_GAIN = 0.1
"""Ziegler et al.'s K."""
_LARGEST_ERROR = 0.2


def adapted_coefficient(coefficient: float, divergence: float, target: float) -> float:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section
    2.2).

        e = clip(KL / target - 1, -0.2, 0.2),    coef <- coef (1 + 0.1 e)

    `divergence` and `target` are in nats per token: the mean of k3 over a batch's
    trained tokens. The paper's are sums over a sequence. verl has the form of the
    paper's code, coef (1 + e n / horizon), with the mean over samples.
    """
    error = divergence / target - 1.0
    error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coefficient * (1.0 + _GAIN * error)


class AdaptiveKL(Section):
    """Adapts the coefficient of the KL."""

    after_each: ClassVar[Literal["batch", "optimizer_step"]] = "batch"
    means: ClassVar = (_DIVERGENCE,)
    sums: ClassVar = ()
    target: PositiveFloat = Field(
        description="KL to the reference, in nats per token, towards which the coefficient is adapted"
    )

    def check(self, config: Config) -> None:
        """Raise ConfigError without a KL."""
        if config.algorithm.kl is None:
            reason = "there is no KL whose coefficient could be adapted"
            raise ConfigError("kl.coefficient", None, reason, "set --kl.coefficient")

    def start(self, algorithm: AlgorithmConfig) -> Mapping[str, float]:
        """Return the coefficient of the settings."""
        return {_COEFFICIENT: algorithm.kl.coefficient if algorithm.kl else 0.0}

    def __call__(
        self, state: Mapping[str, float], measured: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return the coefficient after a batch."""
        coefficient = adapted_coefficient(
            state[_COEFFICIENT], measured[_DIVERGENCE], self.target
        )
        return {_COEFFICIENT: coefficient}

    def within(
        self, algorithm: AlgorithmConfig, state: Mapping[str, float]
    ) -> AlgorithmConfig:
        """Return the settings with the coefficient."""
        if algorithm.kl is None:
            return algorithm
        kl = algorithm.kl.model_copy(update={"coefficient": state[_COEFFICIENT]})
        return algorithm.model_copy(update={"kl": kl})
