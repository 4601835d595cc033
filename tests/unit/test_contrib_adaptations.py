"""Coefficients of KL and entropy that are adapted after each batch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.policy_loss.axis_plugins import load_adaptations
from invrl.algorithms.tables import EntropyConfig, KlConfig
from invrl.contrib import adaptive_entropy, adaptive_kl
from invrl.contrib.adaptive_entropy import AdaptiveEntropy
from invrl.contrib.adaptive_kl import AdaptiveKL
from invrl.interfaces import Adaptation

PLAIN = AlgorithmConfig()
BONUS = AlgorithmConfig(entropy=EntropyConfig(coefficient=0.1))


def after(
    adaptation: Adaptation,
    state: Mapping[str, float],
    *,
    divergence: float = 0.0,
    entropy: float = 0.0,
) -> Mapping[str, float]:
    return adaptation(state, {"kl_reference": divergence, "entropy": entropy})


def entropy_coefficient(
    adaptation: Adaptation,
    state: Mapping[str, float],
    config: AlgorithmConfig = PLAIN,
) -> float:
    within = adaptation.within(config, state)
    assert within.entropy is not None
    return within.entropy.coefficient


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
    assert adaptive_kl.adapted_coefficient(0.5, divergence, 0.1) == pytest.approx(
        0.5 * factor
    )


def test_kl_coefficient_reaches_its_target() -> None:
    """Where the divergence is inverse to the coefficient, KL = 0.02 / coef, the target
    of 0.1 is at 0.2."""
    coef = 1.0
    for _ in range(400):
        coef = adaptive_kl.adapted_coefficient(coef, 0.02 / coef, 0.1)
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
    assert adaptive_entropy.adapted_coefficient(
        coef, entropy, 0.2, 0.005
    ) == pytest.approx(expected)


def test_settings_without_an_adaptation_do_not_change() -> None:
    config = AlgorithmConfig(
        kl=KlConfig(coefficient=0.3), entropy=EntropyConfig(coefficient=0.02)
    )
    assert load_adaptations(config) == {}


def test_entropy_bonus_is_0_while_the_entropy_is_above_its_target() -> None:
    adaptation = AdaptiveEntropy(target=0.2)
    low = after(adaptation, adaptation.start(BONUS), entropy=0.1)
    assert entropy_coefficient(adaptation, low, BONUS) == pytest.approx(0.105)
    high = after(adaptation, low, entropy=0.5)
    assert entropy_coefficient(adaptation, high, BONUS) == 0.0
    assert high["entropy_coef_outside"] == pytest.approx(0.1), "it is remembered"
    low_again = after(adaptation, high, entropy=0.1)
    assert entropy_coefficient(adaptation, low_again, BONUS) == pytest.approx(0.105)


def test_both_coefficients_are_adapted_together() -> None:
    config = AlgorithmConfig(
        kl=KlConfig(coefficient=1.0),
        adaptations=(
            "invrl.contrib.adaptive_kl:AdaptiveKL",
            "invrl.contrib.adaptive_entropy:AdaptiveEntropy",
        ),
        plugin={"AdaptiveKL": {"target": 0.1}, "AdaptiveEntropy": {"target": 0.2}},
    )
    within = config
    for adaptation in load_adaptations(config).values():
        state = after(adaptation, adaptation.start(config), divergence=1.0, entropy=0.1)
        within = adaptation.within(within, state)
    assert within.kl is not None
    assert within.kl.coefficient == pytest.approx(1.02)
    assert within.entropy is not None
    assert within.entropy.coefficient == pytest.approx(0.005)
    assert within.model_copy(update={"kl": config.kl, "entropy": None}) == config


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
    assert adaptive_entropy.coefficient_of_band(
        coef, entropy, 0.2, 0.4, 0.005
    ) == pytest.approx(expected)


def test_entropy_bonus_or_penalty_acts_only_outside_of_the_band() -> None:
    adaptation = AdaptiveEntropy(target=0.2, ceiling=0.4)
    start = adaptation.start(BONUS)
    for entropy, coefficient in ((0.1, 0.105), (0.3, 0.0), (0.5, -0.005)):
        state = after(adaptation, start, entropy=entropy)
        acting = entropy_coefficient(adaptation, state, BONUS)
        assert acting == pytest.approx(coefficient)


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
    adaptation = AdaptiveEntropy(target=0.2, ceiling=0.4)
    state = adaptation.start(AlgorithmConfig())
    seen: list[float] = []
    for _ in range(400):
        entropy += drift + entropy_coefficient(adaptation, state)
        state = after(adaptation, state, entropy=entropy)
        seen.append(entropy)
    assert min(seen[100:]) > 0.15
    assert max(seen[100:]) < 0.45


@pytest.mark.parametrize(
    ("adaptation", "means"),
    [
        (AdaptiveKL(target=0.1), ("kl_reference",)),
        (AdaptiveEntropy(target=0.1), ("entropy",)),
    ],
)
def test_coefficients_are_adapted_once_a_batch(
    adaptation: Adaptation, means: tuple[str, ...]
) -> None:
    assert isinstance(adaptation, Adaptation)
    assert adaptation.after_each == "batch"
    assert adaptation.means == means
