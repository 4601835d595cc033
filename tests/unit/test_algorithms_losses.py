"""policy_loss against an independent float64 computation: plain loops, math.exp, and
the analytic gradient written out by hand. Random tensors would hide the corners, so
hypothesis draws them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_samples import one_row, tokens_alone

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.policy_loss.kl import k3
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.algorithms.presets import PRESETS
from invrl.algorithms.tables import KlConfig
from invrl.types.metrics import merge, resolve

TOLERANCE = 2e-5  # float32 sums of up to 100 terms of size up to 20


@dataclass(frozen=True)
class Token:
    current: float
    old: float
    rollout: float
    advantage: float
    reference: float


def within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def reference_token(token: Token, config: AlgorithmConfig) -> tuple[float, float]:
    """Loss of one token and its derivative with respect to the current log-prob, in
    float64."""
    log_ratio = token.current - token.old
    ratio = math.exp(within(log_ratio, -20.0, 20.0))
    weight = 1.0
    if config.correction == "truncated":
        log_weight = within(token.old - token.rollout, -20.0, 20.0)
        weight = min(math.exp(log_weight), config.correction_cap)
    low = 1 - config.eps_clip_low
    high = 1 + config.eps_clip_high
    is_clipped = False
    used_ratio = ratio
    if token.advantage > 0 and ratio > high:
        is_clipped = True
        used_ratio = high
    if token.advantage < 0 and ratio < low:
        is_clipped = True
        used_ratio = low
    if config.dual_clip and token.advantage < 0 and ratio > config.dual_clip:
        is_clipped = True
        used_ratio = config.dual_clip
    loss = -weight * used_ratio * token.advantage
    gradient = -weight * ratio * token.advantage
    if is_clipped or abs(log_ratio) > 20.0:
        gradient = 0.0
    gap = token.reference - token.current
    bounded_gap = within(gap, -20.0, 20.0)
    divergence = math.exp(bounded_gap) - bounded_gap - 1
    if config.kl is None:
        return loss, gradient
    if config.kl.clamp and divergence > config.kl.clamp:
        return loss + config.kl.coefficient * config.kl.clamp, gradient
    loss += config.kl.coefficient * divergence
    if abs(gap) <= 20.0:
        gradient += config.kl.coefficient * (1 - math.exp(gap))
    return loss, gradient


def reference_loss(
    tokens: list[Token], config: AlgorithmConfig, denominator: float
) -> tuple[float, list[float]]:
    total = 0.0
    gradient_N: list[float] = []
    for token in tokens:
        loss, gradient = reference_token(token, config)
        total += loss
        gradient_N.append(gradient / denominator)
    return total / denominator, gradient_N


def run(
    tokens: list[Token], config: AlgorithmConfig, denominator: float
) -> tuple[LossOutputs, torch.Tensor]:
    def column(name: str) -> torch.Tensor:
        values = [getattr(token, name) for token in tokens]
        return torch.tensor(values, dtype=torch.float32)

    current_N = column("current").requires_grad_()
    inputs = LossInputs(
        current_N=current_N,
        old_N=column("old"),
        rollout_N=column("rollout"),
        advantages_N=column("advantage"),
        reference_N=column("reference"),
        entropy_N=None,
        samples=one_row(len(tokens)),
        denominators=tokens_alone(denominator),
    )
    outputs = policy_loss(inputs, config)
    outputs.loss.backward()
    assert current_N.grad is not None
    return outputs, current_N.grad


def near_a_bound(token: Token, config: AlgorithmConfig) -> bool:
    """float32 and float64 may disagree on which side of a bound a number lies; ties
    have their own test."""
    ratio = math.exp(token.current - token.old)
    bounds = [1 - config.eps_clip_low, 1 + config.eps_clip_high]
    if config.dual_clip is not None:
        bounds.append(config.dual_clip)
    gap = token.reference - token.current
    divergence = math.exp(gap) - gap - 1
    clamp = config.kl.clamp if config.kl is not None else None
    at_clamp = clamp is not None and abs(divergence - clamp) < 1e-3
    return at_clamp or any(abs(ratio - bound) < 1e-4 for bound in bounds)


def exact(low: float, high: float) -> st.SearchStrategy[float]:
    """Multiples of 1/1024: exact in float32 and float64, and so are their sums."""
    return st.integers(int(low * 1024), int(high * 1024)).map(lambda n: n / 1024)


logprobs = exact(-4.0, 0.0)
advantages = st.one_of(st.just(0.0), exact(-3.0, 3.0))
tokens_strategy = st.builds(
    lambda old, d_current, d_rollout, d_reference, advantage: Token(
        current=old + d_current,
        old=old,
        rollout=old + d_rollout,
        advantage=advantage,
        reference=old + d_reference,
    ),
    logprobs,
    exact(-1.0, 1.0),
    exact(-1.5, 1.5),
    exact(-1.0, 1.0),
    advantages,
)
configs = st.builds(
    AlgorithmConfig,
    eps_clip_low=st.sampled_from([0.1, 0.2, 0.5]),
    eps_clip_high=st.sampled_from([0.1, 0.28, 0.4]),
    correction=st.sampled_from(["none", "truncated"]),
    correction_cap=st.sampled_from([1.0, 2.0]),
    kl=st.none()
    | st.builds(
        KlConfig,
        coefficient=st.sampled_from([0.04, 1.0]),
        clamp=st.sampled_from([None, 0.25, 10.0]),
    ),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(tokens_strategy, min_size=1, max_size=40),
    config=configs,
    others=st.integers(0, 60),
)
def test_loss_and_gradient_equal_float64(
    tokens: list[Token], config: AlgorithmConfig, others: int
) -> None:
    tokens = [token for token in tokens if not near_a_bound(token, config)]
    denominator = float(max(1, len(tokens)) + others)  # tokens that other ranks hold
    expected, expected_N = reference_loss(tokens, config, denominator)
    outputs, gradient_N = run(tokens, config, denominator)
    assert outputs.loss.item() == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    assert gradient_N.tolist() == pytest.approx(
        expected_N, rel=TOLERANCE, abs=TOLERANCE
    )
    if tokens:
        mean_of_tokens = expected * denominator / len(tokens)
        assert resolve(outputs.metrics)["loss"] == pytest.approx(
            mean_of_tokens, rel=TOLERANCE, abs=TOLERANCE
        )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(tokens_strategy, max_size=12), min_size=1, max_size=6),
    config=configs,
    mini_batches=st.integers(1, 3),
)
def test_losses_of_micro_batches_add_up(
    rows: list[list[Token]], config: AlgorithmConfig, mini_batches: int
) -> None:
    """Rows may be empty (fully masked). Each mini-batch has its own denominator; its
    micro-batches, one per row, sum to the loss, gradient and metrics of all its tokens
    at once."""
    for k in range(mini_batches):
        rows_of_mini_batch = rows[k::mini_batches]
        tokens = [token for row in rows_of_mini_batch for token in row]
        denominator = float(max(1, len(tokens)))
        whole, whole_gradient_N = run(tokens, config, denominator)
        loss = 0.0
        gradient: list[float] = []
        metrics = []
        for row in rows_of_mini_batch:
            outputs, gradient_N = run(row, config, denominator)
            loss += outputs.loss.item()
            gradient += gradient_N.tolist()
            metrics.append(outputs.metrics)
        assert loss == pytest.approx(whole.loss.item(), rel=1e-5, abs=1e-5)
        assert gradient == pytest.approx(whole_gradient_N.tolist(), rel=1e-6, abs=1e-7)
        if rows_of_mini_batch:
            expected = resolve(whole.metrics)
            assert resolve(merge(metrics)) == pytest.approx(
                expected, rel=1e-5, abs=1e-5
            )


def one(ratio: float, advantage: float) -> Token:
    """A token whose ratio is exact in float32: old is log-prob 0."""
    return Token(
        current=math.log(ratio),
        old=0.0,
        rollout=0.0,
        advantage=advantage,
        reference=math.log(ratio),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.25, 0.0),  # above the bound, wants up: clipped
        (1.5, -1.0, 1.5, 1.5),  # above the bound, wants down: not clipped
        (0.25, -1.0, 0.5, 0.0),  # below the bound, wants down: clipped
        (0.25, 1.0, -0.25, -0.25),  # below the bound, wants up: not clipped
        (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient is -A
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipping_in_each_direction_has_the_expected_loss_and_gradient(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    config = AlgorithmConfig(eps_clip_low=0.5, eps_clip_high=0.25)
    outputs, measured = run([one(ratio, advantage)], config, 1.0)
    assert outputs.loss.item() == pytest.approx(loss, abs=1e-6)
    assert measured.tolist() == pytest.approx([gradient], abs=1e-6)


def test_ratio_equal_to_the_bound_is_not_clipped() -> None:
    """On the bound both branches are equal, so the loss is certain; the clip fraction
    counts neither."""
    from invrl.algorithms.policy_loss.policy_losses import clip, clipped_tokens

    ratio_N = torch.tensor([1.25, 1.25, 0.5, 0.5], requires_grad=True)
    advantages_N = torch.tensor([1.0, -1.0, 1.0, -1.0])
    losses_N = clip(ratio_N, advantages_N, eps_clip_low=0.5, eps_clip_high=0.25)
    assert losses_N.tolist() == [-1.25, 1.25, -0.5, 0.5]
    losses_N.sum().backward()
    assert ratio_N.grad is not None
    assert torch.isfinite(ratio_N.grad).all()
    clipped = clipped_tokens(
        ratio_N.detach(),
        advantages_N,
        eps_clip_low=0.5,
        eps_clip_high=0.25,
        dual_clip=1.25,
    )
    assert not clipped["clip_fraction"].any()


def test_metrics_count_clipped_and_capped_tokens() -> None:
    config = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.2, correction_cap=2.0)
    tokens = [
        one(1.5, 1.0),
        one(0.5, -1.0),
        one(0.5, -1.0),
        replace(one(1.0, 1.0), rollout=-2.0),  # old/rollout = e^2, capped at 2
        one(1.5, -1.0),
    ]
    outputs, _ = run(tokens, config, 5.0)
    metrics = resolve(outputs.metrics)
    assert metrics["clip_fraction"] == pytest.approx(3 / 5)
    assert metrics["clip_fraction_low"] == pytest.approx(2 / 5)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["correction_capped_fraction"] == pytest.approx(1 / 5)
    assert metrics["correction_mean"] == pytest.approx((4 + 2) / 5)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["logprob_gap_mean"] == pytest.approx(2 / 5)
    assert metrics["logprob_gap_max"] == pytest.approx(2.0)
    assert metrics["kl_reference"] == pytest.approx(0.0)
    assert metrics["clip_fraction_dual"] == 0.0


def test_metrics_count_dual_clipped_and_clamped_tokens() -> None:
    config = AlgorithmConfig(
        dual_clip=3.0,
        kl={"coefficient": 0.1, "clamp": 2.0},
    )
    far = replace(one(1.0, 0.0), reference=3.0)  # k3 is e^3 - 4 = 16.1
    outputs, _ = run([one(4.0, -1.0), one(2.0, -1.0), one(4.0, 1.0), far], config, 4.0)
    metrics = resolve(outputs.metrics)
    assert metrics["clip_fraction_dual"] == pytest.approx(1 / 4)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 4)
    assert metrics["clip_fraction"] == pytest.approx(2 / 4)
    assert metrics["kl_clamped_fraction"] == pytest.approx(1 / 4)
    assert metrics["kl_reference"] == pytest.approx((math.exp(3) - 4) / 4, rel=1e-5)


def test_approx_kl_is_the_estimator_for_samples_of_old() -> None:
    """(r - 1) - log r with r = current/old. With r its inverse it is another number: at
    r = 1/2 0.307 instead of 0.193."""
    ratios = (1.5, 0.5, 0.5, 1.0, 1.5)
    outputs, _ = run([one(ratio, 1.0) for ratio in ratios], AlgorithmConfig(), 5.0)
    expected = sum((ratio - 1) - math.log(ratio) for ratio in ratios) / 5
    assert resolve(outputs.metrics)["approx_kl"] == pytest.approx(expected, rel=1e-5)


def test_approx_kl_estimates_the_divergence_of_old_from_current() -> None:
    """Two distributions over three tokens; the sample holds each token as often as old
    gives it, so the mean of the estimator is KL(old || current) itself."""
    old = (0.5, 0.25, 0.25)
    current = (0.125, 0.625, 0.25)
    counts = (2, 1, 1)
    tokens: list[Token] = []
    forward = 0.0
    reverse = 0.0
    for p, q, count in zip(old, current, counts, strict=True):
        token = replace(
            one(1.0, 0.0), current=math.log(q), old=math.log(p), rollout=math.log(p)
        )
        tokens += [token] * count
        forward += p * math.log(p / q)
        reverse += q * math.log(q / p)
    outputs, _ = run(tokens, AlgorithmConfig(), 4.0)
    assert resolve(outputs.metrics)["approx_kl"] == pytest.approx(forward, rel=1e-5)
    assert abs(forward - reverse) > 0.05


@pytest.mark.parametrize("gap", [1e-4, -1e-4, 0.01])
def test_the_kl_of_policies_that_hardly_differ_keeps_its_digits(gap: float) -> None:
    """Near 0 it is gap^2 / 2, of which exp(gap) - gap - 1 in float32 has no digit
    left."""
    policy_N = torch.tensor([0.0])
    other_N = torch.tensor([gap])
    exact = math.expm1(other_N.item()) - other_N.item()
    assert k3(policy_N, other_N).item() == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_token_that_lost_its_probability_does_not_dominate_the_step(
    advantage: float,
) -> None:
    """Its log-prob fell by 11 nats below the reference's among 3,000 ordinary tokens.
    Unbounded, its k3 is 59,862, with the same number as gradient."""
    down = replace(one(1.0, -1.0), reference=0.01)
    up = replace(one(1.0, 1.0), reference=0.01)
    ordinary = [down, up] * 1500
    lost = Token(
        current=-11.0, old=-11.0, rollout=-11.0, advantage=advantage, reference=0.0
    )
    config = AlgorithmConfig(kl=KlConfig(coefficient=0.04))
    outputs, gradient_N = run([*ordinary, lost], config, 3001.0)
    _, ordinary_gradient_N = run(ordinary, config, 3001.0)
    assert abs(outputs.loss.item()) < 2.0
    assert gradient_N.norm().item() < 1.01 * ordinary_gradient_N.norm().item()
    assert gradient_N[-1].item() == pytest.approx(-advantage / 3001, rel=1e-4)


def test_a_punished_token_that_became_likely_has_a_bounded_loss() -> None:
    """A ratio of e^11 under an advantage of -1: a loss of 3 and no gradient; without
    the dual clip 59,874."""
    token = Token(
        current=-1.0, old=-12.0, rollout=-12.0, advantage=-1.0, reference=-1.0
    )
    outputs, gradient = run([token], AlgorithmConfig(), 1.0)
    assert outputs.loss.item() == pytest.approx(3.0)
    assert gradient.tolist() == [0.0]
    outputs, gradient = run([token], AlgorithmConfig(dual_clip=None), 1.0)
    assert outputs.loss.item() == pytest.approx(math.exp(11), rel=1e-5)
    assert gradient.tolist() == pytest.approx([math.exp(11)], rel=1e-5)


@pytest.mark.parametrize("gap", [-200.0, 200.0])
def test_large_logprob_gap_does_not_overflow_the_policy_loss(gap: float) -> None:
    """e^200 is infinite in float32; log-ratios are clamped at 20 before exp."""
    config = AlgorithmConfig(kl={"coefficient": 1.0, "clamp": None}, dual_clip=None)
    tokens = [
        Token(current=gap, old=0.0, rollout=0.0, advantage=-1.0, reference=0.0),
        Token(current=0.0, old=gap, rollout=0.0, advantage=-1.0, reference=0.0),
        Token(current=0.0, old=0.0, rollout=gap, advantage=-1.0, reference=gap),
    ]
    outputs, gradient = run(tokens, config, 3.0)
    expected, expected_gradient = reference_loss(tokens, config, 3.0)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient.tolist() == pytest.approx(expected_gradient, rel=1e-5)
    assert all(
        math.isfinite(value)
        for name, value in resolve(outputs.metrics).items()
        if "gap" not in name
    )


def test_an_empty_micro_batch_has_a_gradient_path_and_neutral_metrics() -> None:
    outputs, gradient = run([], AlgorithmConfig(kl={"coefficient": 0.1}), 0.0)
    assert outputs.loss.item() == 0.0
    assert gradient.shape == (0,)
    full, _ = run([one(1.5, 1.0)], AlgorithmConfig(kl={"coefficient": 0.1}), 1.0)
    assert merge([outputs.metrics, full.metrics]) == full.metrics


def test_entropy_is_reported_and_does_not_change_the_loss() -> None:
    zero = torch.zeros(3)
    inputs = LossInputs(
        current_N=zero.clone().requires_grad_(),
        old_N=zero,
        rollout_N=zero,
        advantages_N=torch.ones(3),
        reference_N=None,
        entropy_N=torch.tensor([1.0, 2.0, 3.0]),
        samples=one_row(3),
        denominators=tokens_alone(3.0),
    )
    outputs = policy_loss(inputs, AlgorithmConfig())
    assert outputs.loss.item() == -1.0
    assert resolve(outputs.metrics)["entropy"] == 2.0
    assert "kl_reference" not in outputs.metrics


def test_no_gradient_reaches_old_rollout_or_reference() -> None:
    tensors = [torch.zeros(2).requires_grad_() for _ in range(4)]
    current_N, old_N, rollout_N, reference_N = tensors
    inputs = LossInputs(
        current_N=current_N,
        old_N=old_N,
        rollout_N=rollout_N,
        advantages_N=torch.ones(2),
        reference_N=reference_N,
        entropy_N=None,
        samples=one_row(2),
        denominators=tokens_alone(2.0),
    )
    policy_loss(inputs, AlgorithmConfig(kl={"coefficient": 1.0})).loss.backward()
    assert current_N.grad is not None
    assert old_N.grad is None
    assert rollout_N.grad is None
    assert reference_N.grad is None


def test_wrong_loss_inputs_are_refused() -> None:
    zero = torch.zeros(2)
    with pytest.raises(ValueError, match="one shape"):
        LossInputs(
            current_N=zero,
            old_N=torch.zeros(3),
            rollout_N=zero,
            advantages_N=zero,
            reference_N=None,
            entropy_N=None,
            samples=one_row(3),
            denominators=tokens_alone(3.0),
        )
    inputs = LossInputs(
        current_N=zero,
        old_N=zero,
        rollout_N=zero,
        advantages_N=zero,
        reference_N=None,
        entropy_N=None,
        samples=one_row(2),
        denominators=tokens_alone(2.0),
    )
    with pytest.raises(ValueError, match="denominator"):
        replace(inputs, denominators=tokens_alone(1.0))
    with pytest.raises(ValueError, match="one shape"):
        replace(inputs, columns={"score": torch.zeros(3)})
    with pytest.raises(ValueError, match="one shape"):
        replace(inputs, samples=one_row(3))
    with pytest.raises(ValueError, match="no reference"):
        policy_loss(inputs, AlgorithmConfig(kl={"coefficient": 0.1}))


def unclipped(
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
) -> torch.Tensor:
    return -ratio_N * advantages_N


def test_policy_loss_of_the_user_replaces_the_built_in_one() -> None:
    log_two = torch.full((1,), math.log(2.0))
    zero = torch.zeros(1)
    inputs = LossInputs(
        current_N=log_two.requires_grad_(),
        old_N=zero,
        rollout_N=zero,
        advantages_N=torch.ones(1),
        reference_N=None,
        entropy_N=None,
        samples=one_row(1),
        denominators=tokens_alone(1.0),
    )
    assert policy_loss(
        inputs, AlgorithmConfig(policy_loss=f"{__name__}:unclipped")
    ).loss.item() == pytest.approx(-2.0)
    metrics = policy_loss(
        inputs, AlgorithmConfig(policy_loss=f"{__name__}:unclipped")
    ).metrics
    assert not [name for name in metrics if name.startswith("clip_fraction")], (
        "it clips nothing"
    )
    assert policy_loss(inputs, AlgorithmConfig()).loss.item() == pytest.approx(-1.2)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_only_sets_fields(name: str) -> None:
    config = AlgorithmConfig.model_validate(PRESETS[name])
    dumped = config.model_dump()
    for field, value in PRESETS[name].items():
        if isinstance(value, dict):
            given = {k: None if part is False else part for k, part in value.items()}
            assert {key: dumped[field][key] for key in value} == given
        elif isinstance(dumped[field], tuple):
            assert dumped[field] == tuple(value.split(","))
        else:
            assert dumped[field] == (None if value is False else value)
