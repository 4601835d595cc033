"""Coefficients of the loss that are adapted after each batch, from what the batch measured.

A controller is a function of numbers; what it has come to is saved with the trainer's checkpoint.
"""

from dataclasses import dataclass

from invrl.algorithms.config import AlgorithmConfig

_GAIN = 0.1
"""Ziegler et al.'s K."""
_LARGEST_ERROR = 0.2
_LARGEST_ENTROPY_COEF = 1.0
"""As in TRL."""


def adapted_kl_coef(coef: float, divergence: float, target: float) -> float:
    """The proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, section 2.2).

        e = clip(KL / target - 1, -0.2, 0.2),    coef <- coef (1 + 0.1 e)

    `divergence` and `target` are in nats per token: the mean of k3 over a batch's trained tokens. The paper's
    are sums over a sequence. verl has the form of the paper's code, coef (1 + e n / horizon), with the mean
    over rows.
    """
    error = divergence / target - 1.0
    error = min(max(error, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1.0 + _GAIN * error)


def adapted_entropy_coef(coef: float, entropy: float, target: float, step: float) -> float:
    """Skywork-OR1's coefficient (arXiv 2505.22312, section 3.2.5): it grows by `step` after a batch whose
    mean entropy is below the target and shrinks by it otherwise, between 0 and 1 (TRL's bounds)."""
    coef += step if entropy < target else -step
    return min(max(coef, 0.0), _LARGEST_ENTROPY_COEF)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What the controllers have come to."""

    kl: float
    entropy: float
    entropy_acts: bool
    """Whether the entropy was at most the target when it was last measured."""

    @staticmethod
    def of(config: AlgorithmConfig) -> "Coefficients":
        """At the start of a run."""
        return Coefficients(kl=config.kl_coef, entropy=config.entropy_coef, entropy_acts=True)

    def after(self, config: AlgorithmConfig, divergence: float, entropy: float) -> "Coefficients":
        """After a batch with these means over its trained tokens, in nats. `config`: the run's, with its
        targets."""
        kl = self.kl
        if config.kl_target:
            kl = adapted_kl_coef(kl, divergence, config.kl_target)
        if not config.entropy_target:
            return Coefficients(kl, self.entropy, self.entropy_acts)
        target = config.entropy_target
        adapted = adapted_entropy_coef(self.entropy, entropy, target, config.entropy_coef_step)
        return Coefficients(kl, adapted, entropy <= target)

    def within(self, config: AlgorithmConfig) -> AlgorithmConfig:
        """The run's settings with these coefficients in the place of those that it began with. With a target
        the entropy bonus acts only while the entropy is at most the target."""
        entropy = self.entropy if self.entropy_acts else 0.0
        return config.model_copy(update={"kl_coef": self.kl, "entropy_coef": entropy})
