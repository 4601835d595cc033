"""Coefficients that are adapted after each batch."""

from __future__ import annotations

import pytest

from invrl.algorithms.adaptive import (
    Coefficients,
    adapted_entropy_coef,
    adapted_kl_coef,
    band_entropy_coef,
)
from invrl.algorithms.config import (
    AlgorithmConfig,
    EntropyConfig,
    KlConfig,
    LengthWeightsConfig,
)


def entropy_coefficient(config: AlgorithmConfig) -> float:
    assert config.entropy is not None
    return config.entropy.coefficient


@pytest.mark.parametrize(
    ("divergence", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1.01),
        (0.09, 0.99),
        (5.0, 1.02),
        (0.0, 0.98),
        (-1.0, 0.98),
    ],
)
def test_the_kl_coefficient_moves_in_proportion_and_by_two_percent_at_most(
    divergence: float, factor: float
) -> None:
    assert adapted_kl_coef(0.5, divergence, 0.1) == pytest.approx(0.5 * factor)


def test_kl_coefficient_reaches_its_target() -> None:
    """Where the divergence is inverse to the coefficient, KL = 0.02 / coef, the target
    of 0.1 is at 0.2."""
    coef = 1.0
    for _ in range(400):
        coef = adapted_kl_coef(coef, 0.02 / coef, 0.1)
    assert coef == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.0, 0.1, 0.005),
        (0.1, 0.3, 0.095),
        (0.002, 0.3, 0.0),
        (1.0, 0.1, 1.0),
        (0.1, 0.2, 0.095),
    ],
)
def test_the_entropy_coefficient_moves_by_steps_within_bounds(
    coef: float, entropy: float, expected: float
) -> None:
    assert adapted_entropy_coef(coef, entropy, 0.2, 0.005) == pytest.approx(expected)


def test_coefficients_without_a_target_do_not_change() -> None:
    config = AlgorithmConfig(
        kl=KlConfig(coefficient=0.3), entropy=EntropyConfig(coefficient=0.02)
    )
    after = Coefficients.of(config).after(config, 9.0, 9.0)
    assert after.within(config) == config


def test_length_lambda_follows_only_its_own_gradient() -> None:
    config = AlgorithmConfig(
        length_weights=LengthWeightsConfig(exponent=0.5, lr=0.1),
        entropy=EntropyConfig(target=0.2),
        kl=KlConfig(coefficient=0.1, target=0.1),
    )
    start = Coefficients.of(config)
    stepped = start.after_step(LengthWeightsConfig(lr=0.1), 2.0)
    assert stepped.length_lambda == pytest.approx(0.3)
    assert start.after(config, 1.0, 0.1).length_lambda == 0.5
    assert start.after_step(LengthWeightsConfig(lr=0.0), 2.0) == start


def test_entropy_bonus_is_0_while_the_entropy_is_above_its_target() -> None:
    config = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1, target=0.2))
    low = Coefficients.of(config).after(config, 0.0, 0.1)
    assert entropy_coefficient(low.within(config)) == pytest.approx(0.105)
    high = low.after(config, 0.0, 0.5)
    assert entropy_coefficient(high.within(config)) == 0.0
    assert high.entropy == pytest.approx(0.1), "it is remembered"
    assert entropy_coefficient(
        high.after(config, 0.0, 0.1).within(config)
    ) == pytest.approx(0.105)


def test_both_coefficients_are_adapted_together() -> None:
    config = AlgorithmConfig(
        kl=KlConfig(coefficient=1.0, target=0.1), entropy=EntropyConfig(target=0.2)
    )
    within = Coefficients.of(config).after(config, 1.0, 0.1).within(config)
    assert within.kl is not None
    assert within.kl.coefficient == pytest.approx(1.02)
    assert entropy_coefficient(within) == pytest.approx(0.005)
    assert (
        within.model_copy(update={"kl": config.kl, "entropy": config.entropy}) == config
    )


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.0, 0.1, 0.005),
        (0.1, 0.1, 0.105),
        (-0.1, 0.1, 0.005),
        (1.0, 0.1, 1.0),
        (0.0, 0.5, -0.005),
        (-0.1, 0.5, -0.105),
        (0.1, 0.5, -0.005),
        (-1.0, 0.5, -1.0),
        (0.1, 0.3, 0.095),
        (-0.1, 0.3, -0.095),
        (0.002, 0.3, 0.0),
        (-0.002, 0.3, 0.0),
        (0.1, 0.2, 0.095),
        (0.1, 0.4, 0.095),
    ],
)
def test_entropy_coefficient_returns_to_0_between_its_two_bounds(
    coef: float, entropy: float, expected: float
) -> None:
    assert band_entropy_coef(coef, entropy, 0.2, 0.4, 0.005) == pytest.approx(expected)


def test_entropy_bonus_or_penalty_acts_only_outside_of_the_band() -> None:
    config = AlgorithmConfig(
        entropy=EntropyConfig(target=0.2, ceiling=0.4, coefficient=0.1)
    )
    start = Coefficients.of(config)
    assert entropy_coefficient(
        start.after(config, 0.0, 0.1).within(config)
    ) == pytest.approx(0.105)
    assert entropy_coefficient(start.after(config, 0.0, 0.3).within(config)) == 0.0
    assert entropy_coefficient(
        start.after(config, 0.0, 0.5).within(config)
    ) == pytest.approx(-0.005)


@pytest.mark.parametrize(
    ("entropy", "drift"),
    [
        (0.9, 0.01),
        (0.02, -0.01),
        (0.3, 0.01),
        (0.3, -0.01),
    ],
)
def test_entropy_band_holds_a_drifting_entropy(entropy: float, drift: float) -> None:
    """An entropy that the rest of the loss moves by `drift` a batch and the bonus by
    its coefficient."""
    config = AlgorithmConfig(entropy=EntropyConfig(target=0.2, ceiling=0.4))
    coefficients = Coefficients.of(config)
    seen: list[float] = []
    for _ in range(400):
        entropy += drift + entropy_coefficient(coefficients.within(config))
        coefficients = coefficients.after(config, 0.0, entropy)
        seen.append(entropy)
    assert min(seen[100:]) > 0.15
    assert max(seen[100:]) < 0.45
