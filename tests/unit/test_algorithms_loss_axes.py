"""Every combination of the loss's axes against float64 in plain loops, with gradients
by finite differences.

The reference gets the current log-probs twice: those with a gradient and those at which
it is stopped. A difference is taken in the first alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import Denominators, LossInputs, LossOutputs, Samples
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.algorithms.tables import (
    DppoConfig,
    EntropyConfig,
    KlConfig,
    RejectionConfig,
    RejectionGateConfig,
    SapoConfig,
)
from invrl.contrib.lambda_grpo import LAMBDA_GRADIENT, LengthWeight, group_weights
from invrl.types.metrics import merge, resolve

STEP = 1e-6
LENGTH_WEIGHT = "invrl.contrib.lambda_grpo:LengthWeight"
INTERPOLATED = "invrl.contrib.a3po:Interpolated"


@dataclass(frozen=True)
class TokenSequence:
    """One row of a rollout: a list [T] of each number of its tokens."""

    rollout: int
    group: int
    current: list[float]
    old: list[float]
    rollout_logprobs: list[float]
    reference: list[float]
    advantages: list[float]
    entropy: list[float]
    staleness: list[float]


def random_rows(lengths: list[int], seed: int) -> list[TokenSequence]:
    """Every third row is a branch of the rollout before it; a group has two
    rollouts."""
    rng = np.random.default_rng(seed)
    rows: list[TokenSequence] = []
    rollout = -1
    for index, length in enumerate(lengths):
        is_branch = index % 3 == 2
        if not is_branch:
            rollout += 1
        old_T = rng.uniform(-3, -0.05, length)
        current_T = old_T + rng.normal(0, 0.4, length)
        rollout_T = old_T + rng.normal(0, 0.4, length)
        reference_T = old_T + rng.normal(0, 0.8, length)
        advantages_T = rng.normal(0, 1.5, length)
        advantages_T *= rng.random(length) > 0.2
        row = TokenSequence(
            rollout=rollout,
            group=rollout // 2,
            current=current_T.clip(max=-1e-3).tolist(),
            old=old_T.tolist(),
            rollout_logprobs=rollout_T.clip(max=-1e-3).tolist(),
            reference=reference_T.tolist(),
            advantages=advantages_T.tolist(),
            entropy=rng.uniform(0, 2, length).tolist(),
            staleness=rng.integers(0, 4, length).astype(float).tolist(),
        )
        rows.append(row)
    return rows


# ----------------------------------------------------------------- the reference


def clipped_to(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def bounded(value: float) -> float:
    return clipped_to(value, -20.0, 20.0)


def ratio_of(
    row: TokenSequence,
    t: int,
    moving: list[float],
    still: list[float],
    old: list[float],
    level: str,
) -> float:
    log_ratios = [current - other for current, other in zip(moving, old, strict=True)]
    if level == "token":
        return math.exp(bounded(log_ratios[t]))
    if level == "sequence":
        return math.exp(bounded(sum(log_ratios) / len(old)))
    stopped = [current - other for current, other in zip(still, old, strict=True)]
    sequence_ratio = math.exp(bounded(sum(stopped) / len(old)))
    return sequence_ratio * math.exp(moving[t] - still[t])


def policy_loss_values(
    row: TokenSequence,
    t: int,
    moving: list[float],
    still: list[float],
    old: list[float],
    config: AlgorithmConfig,
    advantage: float,
) -> float:
    ratio = ratio_of(row, t, moving, still, old, config.ratio_level)
    stopped_ratio = ratio_of(row, t, still, still, old, config.ratio_level)
    low = 1 - config.eps_clip_low
    high = 1 + config.eps_clip_high
    if config.policy_loss == "clip":
        clipped_ratio = clipped_to(ratio, low, high)
        loss = -min(ratio * advantage, clipped_ratio * advantage)
        if config.dual_clip and advantage < 0:
            loss = min(loss, -config.dual_clip * advantage)
        return loss
    if config.policy_loss == "cispo":
        return -clipped_to(stopped_ratio, low, high) * advantage * moving[t]
    if config.policy_loss == "sapo":
        assert config.sapo is not None
        tau = config.sapo.temperature_negative
        if advantage > 0:
            tau = config.sapo.temperature_positive
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantage
    if config.policy_loss == "rejection_gate":
        assert config.rejection_gate is not None
        sharpness = config.rejection_gate.sharpness
        return -advantage / (1 + math.exp(-sharpness * (ratio - 1)))
    if config.policy_loss == "gmpo":
        return -advantage * row_ratio_of(row, moving, still, old, config)
    if config.policy_loss == "policy_gradient":
        return -advantage * moving[t]
    if config.policy_loss == "vespo":
        assert config.vespo is not None
        power = config.vespo.power_positive
        decay = config.vespo.decay_positive
        if advantage < 0:
            power = config.vespo.power_negative
            decay = config.vespo.decay_negative
        weight = math.exp(bounded(sum(still) - sum(row.rollout_logprobs)))
        kernel = weight**power * math.exp(decay * (1 - weight))
        return -kernel * advantage * moving[t]
    p = math.exp(still[t])
    q = math.exp(row.rollout_logprobs[t])
    distance = abs(p - q)
    if config.policy_loss == "dppo_kl":
        of_sampled = q * math.log(q / p)
        of_others = (1 - q) * math.log((1 - q) / (1 - p))
        distance = of_sampled + of_others
    moves_away = (advantage > 0 and p > q) or (advantage < 0 and p < q)
    assert config.dppo is not None
    if moves_away and distance > config.dppo.threshold:
        return 0.0
    return -ratio * advantage


def row_ratio_of(
    row: TokenSequence,
    moving: list[float],
    still: list[float],
    old: list[float],
    config: AlgorithmConfig,
) -> float:
    """The geometric mean of a row's ratios, of which each is clipped towards its
    advantage."""
    log_ratios: list[float] = []
    for t, advantage in enumerate(row.advantages):
        ratio = ratio_of(row, t, moving, still, old, config.ratio_level)
        log_ratio = math.log(ratio)
        clipped = clipped_to(log_ratio, -config.eps_clip_low, config.eps_clip_high)
        sign = (advantage > 0) - (advantage < 0)
        log_ratios.append(sign * min(sign * log_ratio, sign * clipped))
    return math.exp(math.fsum(log_ratios) / len(log_ratios))


def weight_of(
    row: TokenSequence, t: int, old: list[float], config: AlgorithmConfig
) -> float:
    gaps = [
        own - sampled for own, sampled in zip(old, row.rollout_logprobs, strict=True)
    ]
    weights = {
        "token": math.exp(bounded(gaps[t])),
        "sequence": math.exp(bounded(math.fsum(gaps))),
        "geometric": math.exp(bounded(math.fsum(gaps) / len(gaps))),
    }
    if config.rejection is not None:
        rejection_weight = weights[config.rejection.kind]
        if rejection_weight < (config.rejection.low or 0.0):
            return 0.0
        if config.rejection.high and rejection_weight > config.rejection.high:
            return 0.0
    if config.correction == "none":
        return 1.0
    levels = {"truncated": "token", "sequence_truncated": "sequence"}
    weight = weights[levels.get(config.correction, "geometric")]
    return clipped_to(weight, config.correction_floor or 0.0, config.correction_cap)


def divergence_of(policy: float, other: float, sampled: float, name: str) -> float:
    gap = bounded(policy - other)
    k3 = math.exp(-gap) - 1 + gap
    estimates = {
        "k1": gap,
        "k2": gap * gap / 2,
        "k3": k3,
        "unbiased": math.exp(bounded(policy - sampled)) * k3,
    }
    return estimates[name]


def old_of(row: TokenSequence, still: list[float], c: AlgorithmConfig) -> list[float]:
    if c.old_logprobs == "engine":
        return row.rollout_logprobs
    if c.old_logprobs == "recompute":
        return row.old
    mixed: list[float] = []
    for t, age in enumerate(row.staleness):
        share = 1 / age if age else 0.0
        mixed.append(share * row.rollout_logprobs[t] + (1 - share) * still[t])
    return mixed


def num_tokens(rows: list[TokenSequence]) -> int:
    return sum(len(row.current) for row in rows)


def rows_of_rollout(rollout: int, rows: list[TokenSequence]) -> list[TokenSequence]:
    return [row for row in rows if row.rollout == rollout]


def rows_of_group(group: int, rows: list[TokenSequence]) -> list[TokenSequence]:
    return [row for row in rows if row.group == group]


def aggregation_weight(
    row: TokenSequence, rows: list[TokenSequence], config: AlgorithmConfig
) -> float:
    rollouts = len({other.rollout for other in rows})
    groups = len({other.group for other in rows})
    tokens_of_rollout = num_tokens(rows_of_rollout(row.rollout, rows))
    tokens_of_group = num_tokens(rows_of_group(row.group, rows))
    weights = {
        "token_mean": 1 / num_tokens(rows),
        "sequence_mean": 1 / (len(rows) * len(row.current)),
        "rollout_mean": 1 / (rollouts * tokens_of_rollout),
        "group_mean": 1 / (groups * tokens_of_group),
        "constant": 1 / (rollouts * (config.aggregation_constant or 1)),
    }
    weight = weights[config.aggregation]
    if config.sample_weight is not None:
        weight *= length_weight(row, rows, length_settings(config))
    return weight


def lengths_of_group(group: int, rows: list[TokenSequence]) -> dict[int, int]:
    """Tokens of each rollout."""
    lengths: dict[int, int] = {}
    for row in rows_of_group(group, rows):
        lengths[row.rollout] = lengths.get(row.rollout, 0) + len(row.current)
    return lengths


def length_settings(config: AlgorithmConfig) -> LengthWeight:
    table = config.plugin.by_name.get("LengthWeight", {})
    return LengthWeight.model_validate(table)


def length_weight(
    row: TokenSequence, rows: list[TokenSequence], config: LengthWeight
) -> float:
    lengths = lengths_of_group(row.group, rows)
    size = len(lengths)
    mean = sum(lengths.values()) / size
    squares = sum((length - mean) ** 2 for length in lengths.values())
    deviation = math.sqrt(squares / (size - 1)) if size > 1 else 0.0
    exponentials: dict[int, float] = {}
    for rollout, length in lengths.items():
        normalized = (length - mean) / (deviation + 1e-8)
        base = 1 + config.scale * normalized
        exponentials[rollout] = math.exp(base**config.exponent)
    return size * exponentials[row.rollout] / sum(exponentials.values())


def advantages_of(
    row: TokenSequence, old: list[float], c: AlgorithmConfig
) -> list[float]:
    """With the KL that is in the rewards of this and later tokens."""
    advantages = list(row.advantages)
    if c.kl is None or c.kl.added_to != "reward":
        return advantages
    bound = c.kl.clamp or math.inf
    for t in range(len(advantages)):
        for s in range(t, len(advantages)):
            penalty = divergence_of(
                old[s], row.reference[s], row.rollout_logprobs[s], c.kl.estimator
            )
            advantages[t] -= c.kl.coefficient * min(max(penalty, -bound), bound)
    return advantages


def reference_loss(
    rows: list[TokenSequence], moving: list[list[float]], config: AlgorithmConfig
) -> float:
    """`moving`: the current log-probs with the gradient; those in the rows are
    constants. Entropies are constants too."""
    total = 0.0
    solved: list[float] = []
    for row, current in zip(rows, moving, strict=True):
        old = old_of(row, row.current, config)
        shaped = replace(row, advantages=advantages_of(row, old, config))
        weight = aggregation_weight(row, rows, config)
        for t, advantage in enumerate(shaped.advantages):
            policy_loss = policy_loss_values(
                shaped, t, current, row.current, old, config, advantage
            )
            loss = weight_of(row, t, old, config) * policy_loss
            if config.kl is not None and config.kl.added_to == "loss":
                divergence = divergence_of(
                    current[t],
                    row.reference[t],
                    row.rollout_logprobs[t],
                    config.kl.estimator,
                )
                bound = config.kl.clamp or math.inf
                loss += config.kl.coefficient * clipped_to(divergence, -bound, bound)
            if config.entropy is not None:
                loss -= config.entropy.coefficient * row.entropy[t]
            total += weight * loss
        if is_solved(row):
            solved += current
    if solved and config.solved_nll_coef:
        total -= config.solved_nll_coef * math.fsum(solved) / len(solved)
    return total


def is_solved(row: TokenSequence) -> bool:
    return row.rollout % 2 == 0


def reference_gradient(
    rows: list[TokenSequence], config: AlgorithmConfig
) -> list[float]:
    """NaN where the two one-sided differences disagree: on a bound."""

    def loss_with_step(index: int, t: int, step: float) -> float:
        moved = [list(row.current) for row in rows]
        moved[index][t] += step
        return reference_loss(rows, moved, config)

    gradient: list[float] = []
    middle = reference_loss(rows, [row.current for row in rows], config)
    for index, row in enumerate(rows):
        for t in range(len(row.current)):
            above = loss_with_step(index, t, STEP)
            below = loss_with_step(index, t, -STEP)
            one_sided = abs((above - middle) - (middle - below)) / STEP
            is_on_bound = one_sided > 1e-3
            slope = (above - below) / (2 * STEP)
            gradient.append(math.nan if is_on_bound else slope)
    return gradient


# ----------------------------------------------------------------- what is tested


def inputs_of(
    rows: list[TokenSequence],
    all_rows: list[TokenSequence],
    config: AlgorithmConfig,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """One micro-batch of these rows, of a mini-batch of all rows."""

    def column(name: str) -> torch.Tensor:
        values = [value for row in rows for value in getattr(row, name)]
        return torch.tensor(values, dtype=dtype)

    def of_rows(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    lengths_R = torch.tensor([len(row.current) for row in rows], dtype=torch.int64)
    rollout_tokens = [
        num_tokens(rows_of_rollout(row.rollout, all_rows)) for row in rows
    ]
    group_tokens = [num_tokens(rows_of_group(row.group, all_rows)) for row in rows]
    length_numbers = [length_numbers_of(row, all_rows, config) for row in rows]
    return LossInputs(
        current_N=column("current").requires_grad_(),
        entropy_N=column("entropy").requires_grad_(),
        samples=Samples(
            sample_N=torch.arange(len(rows)).repeat_interleave(lengths_R),
            tokens_R=lengths_R.to(dtype),
            rollout_tokens_R=of_rows(rollout_tokens),
            group_tokens_R=of_rows(group_tokens),
        ),
        denominators=Denominators(
            tokens=num_tokens(all_rows),
            samples=len(all_rows),
            rollouts=len({row.rollout for row in all_rows}),
            groups=len({row.group for row in all_rows}),
            solved_tokens=num_tokens([row for row in all_rows if is_solved(row)]),
        ),
        old_N=column("old"),
        rollout_N=column("rollout_logprobs"),
        advantages_N=column("advantages"),
        reference_N=column("reference"),
        columns={"staleness": column("staleness")},
        numbers={
            "solved": of_rows([float(is_solved(row)) for row in rows]),
            "length_weight": of_rows([weight for weight, _ in length_numbers]),
            "length_slope": of_rows([slope for _, slope in length_numbers]),
        },
    )


def length_numbers_of(
    row: TokenSequence, rows: list[TokenSequence], config: AlgorithmConfig
) -> tuple[float, float]:
    """The weight of the row's rollout, and its slope."""
    settings = length_settings(config)
    lengths = lengths_of_group(row.group, rows)
    weights_G, slopes_G = group_weights(
        np.array(list(lengths.values()), np.float64),
        settings.exponent,
        settings.scale,
    )
    place = list(lengths).index(row.rollout)
    return float(weights_G[place]), float(slopes_G[place])


def run(
    rows: list[TokenSequence],
    all_rows: list[TokenSequence],
    config: AlgorithmConfig,
    dtype: torch.dtype = torch.float64,
) -> tuple[LossOutputs, torch.Tensor, torch.Tensor]:
    """Outputs, and the gradients of current log-probs and entropies."""
    inputs = inputs_of(rows, all_rows, config, dtype)
    outputs = policy_loss(inputs, config)
    outputs.loss.backward()
    assert inputs.current_N.grad is not None
    assert inputs.entropy_N is not None
    entropy_gradient_N = inputs.entropy_N.grad
    if entropy_gradient_N is None:
        entropy_gradient_N = torch.zeros_like(inputs.entropy_N)
    return outputs, inputs.current_N.grad, entropy_gradient_N


length_weights = st.fixed_dictionaries(
    {
        "exponent": st.sampled_from([-3.0, 0.0, 1.0, 4.0]),
        "scale": st.sampled_from([1 / 9, 0.6]),
    }
)
configs = st.builds(
    AlgorithmConfig,
    policy_loss=st.sampled_from(
        [
            "clip",
            "cispo",
            "sapo",
            "rejection_gate",
            "gmpo",
            "dppo_tv",
            "dppo_kl",
            "vespo",
            "policy_gradient",
        ]
    ),
    ratio_level=st.sampled_from(["token", "sequence", "sequence_token"]),
    eps_clip_low=st.sampled_from([0.1, 0.3, 1.0]),
    eps_clip_high=st.sampled_from([0.1, 0.28]),
    dual_clip=st.sampled_from([None, 1.3]),
    sapo=st.builds(SapoConfig, temperature_positive=st.sampled_from([1.0, 2.0])),
    rejection_gate=st.builds(
        RejectionGateConfig, sharpness=st.sampled_from([4.0, 10.0])
    ),
    dppo=st.builds(DppoConfig, threshold=st.sampled_from([0.02, 0.1])),
    correction=st.sampled_from(
        ["none", "truncated", "sequence_truncated", "geometric_truncated"]
    ),
    correction_cap=st.sampled_from([1.1, 2.0]),
    correction_floor=st.sampled_from([None, 0.8]),
    rejection=st.none()
    | st.builds(
        RejectionConfig,
        kind=st.sampled_from(["token", "sequence", "geometric"]),
        low=st.sampled_from([None, 0.7]),
        high=st.sampled_from([None, 1.4]),
    ),
    aggregation=st.sampled_from(
        ["token_mean", "sequence_mean", "rollout_mean", "group_mean", "constant"]
    ),
    aggregation_constant=st.just(7.0),
    sample_weight=st.sampled_from([None, LENGTH_WEIGHT]),
    plugin=st.fixed_dictionaries({"LengthWeight": length_weights}),
    kl=st.none()
    | st.builds(
        KlConfig,
        coefficient=st.just(0.3),
        estimator=st.sampled_from(["k1", "k2", "k3", "unbiased"]),
        added_to=st.sampled_from(["loss", "reward"]),
        clamp=st.sampled_from([None, 0.2]),
    ),
    entropy=st.none() | st.builds(EntropyConfig, coefficient=st.just(0.05)),
    solved_nll_coef=st.sampled_from([None, 0.1]),
    old_logprobs=st.sampled_from(["recompute", "engine", INTERPOLATED]),
)
row_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(lengths=row_lengths, seed=st.integers(0, 10**6), config=configs)
def test_loss_and_gradient_equal_float64_loops(
    lengths: list[int], seed: int, config: AlgorithmConfig
) -> None:
    rows = random_rows(lengths, seed)
    outputs, gradient_N, entropy_gradient_N = run(rows, rows, config)
    expected = reference_loss(rows, [row.current for row in rows], config)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    differences = reference_gradient(rows, config)
    for measured, difference in zip(gradient_N.tolist(), differences, strict=True):
        if not math.isnan(difference):
            assert measured == pytest.approx(difference, rel=1e-5, abs=1e-7)
    assert sum(map(math.isnan, differences)) <= 1, (
        "a bound is hit once in a thousand examples"
    )
    expected_N: list[float] = []
    for row in rows:
        weight = aggregation_weight(row, rows, config)
        bonus = config.entropy.coefficient if config.entropy is not None else 0.0
        expected_N += [-bonus * weight] * len(row.current)
    assert entropy_gradient_N.tolist() == pytest.approx(expected_N, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    lengths=row_lengths,
    seed=st.integers(0, 10**6),
    config=configs,
    weights=length_weights,
)
def test_the_gradient_of_lambda_equals_finite_differences(
    lengths: list[int],
    seed: int,
    config: AlgorithmConfig,
    weights: dict[str, float],
) -> None:
    rows = random_rows(lengths, seed)
    current = [row.current for row in rows]
    config = config.model_copy(update={"sample_weight": LENGTH_WEIGHT})
    config = config.with_plugin_table("LengthWeight", weights)

    def loss_with_step(step: float) -> float:
        moved = {"exponent": weights["exponent"] + step}
        return reference_loss(
            rows, current, config.with_plugin_table("LengthWeight", moved)
        )

    outputs, _, _ = run(rows, rows, config)
    difference = (loss_with_step(1e-5) - loss_with_step(-1e-5)) / 2e-5
    gradient = resolve(outputs.metrics)[LAMBDA_GRADIENT]
    assert gradient == pytest.approx(difference, rel=1e-6, abs=1e-8)


@settings(max_examples=100, deadline=None)
@given(
    lengths=row_lengths,
    seed=st.integers(0, 10**6),
    config=configs,
)
def test_float32_loss_axes_are_near_float64(
    lengths: list[int], seed: int, config: AlgorithmConfig
) -> None:
    rows = random_rows(lengths, seed)
    exact, exact_gradient_N, _ = run(rows, rows, config)
    outputs, gradient_N, _ = run(rows, rows, config, torch.float32)
    assert outputs.loss.item() == pytest.approx(exact.loss.item(), rel=1e-4, abs=1e-5)
    assert gradient_N.tolist() == pytest.approx(
        exact_gradient_N.tolist(), rel=1e-3, abs=1e-5
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=row_lengths,
    seed=st.integers(0, 10**6),
    config=configs,
    data=st.data(),
)
def test_loss_does_not_depend_on_order_or_division_of_samples(
    lengths: list[int], seed: int, config: AlgorithmConfig, data: st.DataObject
) -> None:
    """Into micro-batches, of which some may be empty: the sum of losses, each token's
    gradient and the merged metrics stay what they are."""
    rows = random_rows(lengths, seed)
    whole, whole_gradient_N, _ = run(rows, rows, config)
    gradient_by_row = whole_gradient_N.split(lengths)
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [order[:cut], order[cut:], []]
    total = 0.0
    metrics = []
    for part in parts:
        outputs, gradient_N, _ = run([rows[index] for index in part], rows, config)
        total += outputs.loss.item()
        metrics.append(outputs.metrics)
        expected_N: list[float] = []
        for index in part:
            expected_N += gradient_by_row[index].tolist()
        assert gradient_N.tolist() == pytest.approx(expected_N, rel=1e-9, abs=1e-12)
    assert total == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    merged = resolve(merge(metrics))
    assert merged == pytest.approx(resolve(whole.metrics), rel=1e-9, abs=1e-9)


# ----------------------------------------------------------------- single axes


def one_row(
    current: list[float], old: list[float], advantages: list[float]
) -> list[TokenSequence]:
    zeros = [0.0] * len(current)
    return [TokenSequence(0, 0, current, old, old, zeros, advantages, zeros, zeros)]


def test_sequence_ratio_moves_all_tokens_of_a_sequence_equally() -> None:
    """GSPO: s (1/T) for every token, also for those whose own ratio is far from 1."""
    rows = one_row([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [2.0] * 3)
    config = AlgorithmConfig(
        ratio_level="sequence",
        correction="none",
        aggregation="sequence_mean",
        eps_clip_high=1.0,
    )
    outputs, gradient_N, _ = run(rows, rows, config)
    ratio = math.exp((0.5 - 1.0 + 0.0) / 3)
    assert outputs.loss.item() == pytest.approx(-2 * ratio)
    assert gradient_N.tolist() == pytest.approx([-2 * ratio / 3] * 3)


def test_sequence_ratio_levels_differ_only_where_advantages_differ() -> None:
    equal = one_row([-1.0, -2.0], [-1.1, -2.1], [1.0, 1.0])
    unequal = one_row([-1.0, -2.0], [-1.1, -2.1], [1.0, 0.0])
    sequence = AlgorithmConfig(ratio_level="sequence", correction="none")
    sequence_token = AlgorithmConfig(ratio_level="sequence_token", correction="none")
    _, sequence_N, _ = run(equal, equal, sequence)
    _, sequence_token_N, _ = run(equal, equal, sequence_token)
    assert sequence_N.tolist() == pytest.approx(sequence_token_N.tolist())
    _, [first, second], _ = run(unequal, unequal, sequence)
    assert second.item() == pytest.approx(first.item())
    _, [_, second], _ = run(unequal, unequal, sequence_token)
    assert second.item() == 0.0


def test_a_rejected_sample_has_no_gradient_and_stays_in_the_denominator() -> None:
    first, second = random_rows([3, 4], 0)
    far = replace(first, rollout_logprobs=[old - 1.0 for old in first.old])
    near = replace(second, rollout_logprobs=second.old)
    config = AlgorithmConfig(
        correction="none",
        rejection={"kind": "geometric", "low": 0.999, "high": 1.001},
        dual_clip=None,
    )
    outputs, gradient_N, _ = run([far, near], [far, near], config)
    _, alone_N, _ = run([near], [near], config)
    far_N, near_N = gradient_N.split([3, 4])
    assert far_N.tolist() == [0.0] * 3
    assert near_N.tolist() == pytest.approx((alone_N * 4 / 7).tolist())
    assert resolve(outputs.metrics)["rejected_fraction"] == pytest.approx(3 / 7)


def test_a_negative_coefficient_is_a_penalty_on_the_entropy() -> None:
    """Above the band of entropies (`contrib/adaptive_entropy.py`); settings themselves
    are not negative."""
    rows = random_rows([3, 4], 0)
    penalty = EntropyConfig(coefficient=0.0).model_copy(update={"coefficient": -0.05})
    config = AlgorithmConfig().model_copy(update={"entropy": penalty})
    outputs, _, entropy_gradient_N = run(rows, rows, config)
    plain, _, _ = run(rows, rows, AlgorithmConfig())
    entropies = [entropy for row in rows for entropy in row.entropy]
    mean = sum(entropies) / 7
    assert outputs.loss.item() == pytest.approx(plain.loss.item() + 0.05 * mean)
    assert entropy_gradient_N.tolist() == pytest.approx([0.05 / 7] * 7)


def test_icepop_weights_tokens_within_its_bounds_and_drops_others() -> None:
    """Ratios of 0.4, 0.6, 4 and 6 with bounds 0.5 and 5."""
    old = [math.log(ratio) - 3 for ratio in (0.4, 0.6, 4.0, 6.0)]
    [on_policy_row] = one_row(old, old, [1.0] * 4)
    row = replace(on_policy_row, rollout_logprobs=[-3.0] * 4)
    config = AlgorithmConfig(
        correction_cap=5.0,
        rejection={"kind": "token", "low": 0.5, "high": 5.0},
    )
    _, gradient_N, _ = run([row], [row], config)
    weights = (gradient_N * -4).tolist()
    assert weights == pytest.approx([0.0, 0.6, 4.0, 0.0])


def expected_gradient(
    logits_V: torch.Tensor, reference_V: torch.Tensor, estimator: str
) -> torch.Tensor:
    """The mean gradient of an estimator over all tokens, each as often as the policy
    samples it."""
    from invrl.algorithms.policy_loss.kl import estimate

    policy_V = logits_V.log_softmax(-1)
    terms_V = estimate(estimator, policy_V, reference_V, policy_V.detach())
    probabilities_V = policy_V.detach().exp()
    mean = (probabilities_V * terms_V).sum()
    [gradient_V] = torch.autograd.grad(mean, logits_V)
    return gradient_V


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k1", "none"),
        ("k2", "forward"),
        ("k3", "reverse"),
        ("unbiased", "forward"),
    ],
)
def test_gradient_of_each_kl_estimator_equals_its_table(
    estimator: str, divergence: str
) -> None:
    torch.manual_seed(0)
    logits_V = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference_V = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    policy_V = logits_V.log_softmax(-1)
    exact = {
        "none": 0.0 * policy_V.sum(),
        "forward": (policy_V.exp() * (policy_V - reference_V)).sum(),
        "reverse": (reference_V.exp() * (reference_V - policy_V)).sum(),
    }[divergence]
    [expected] = torch.autograd.grad(exact, logits_V)
    assert expected_gradient(
        logits_V, reference_V, estimator
    ).tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_sum_to_go_restarts_with_each_sample() -> None:
    from invrl.algorithms.policy_loss.kl import to_go

    rows = Samples.each_a_rollout(torch.tensor([0, 0, 0, 1, 1]))
    values_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert to_go(values_N, rows).tolist() == [6.0, 5.0, 3.0, 9.0, 5.0]
    no_rows = Samples.each_a_rollout(torch.zeros(0, dtype=torch.int64))
    assert to_go(torch.zeros(0), no_rows).tolist() == []


@pytest.mark.parametrize(
    "policy_loss_name",
    ["clip", "cispo", "sapo", "rejection_gate", "gmpo", "dppo_tv", "dppo_kl", "vespo"],
)
@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_large_logprob_gap_does_not_overflow_any_loss_axis(
    policy_loss_name: str, gap: float
) -> None:
    """e^200 is infinite in float32; so is the product of a row's ratios."""
    row = replace(
        one_row([gap, -1.0], [0.0, -1.0], [-1.0, 1.0])[0], rollout_logprobs=[0.0, -1.0]
    )
    for level in ("sequence_truncated", "geometric_truncated"):
        config = AlgorithmConfig(
            policy_loss=policy_loss_name,
            correction=level,
            kl={"estimator": "unbiased", "coefficient": 0.1},
        )
        outputs, gradient_N, _ = run([row], [row], config, torch.float32)
        assert math.isfinite(outputs.loss.item())
        assert torch.isfinite(gradient_N).all()
