"""RSPO's weight for routers that have moved, against float64 in plain loops, and what
refuses it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_models import make_family_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import make_tiny_model

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.loss_inputs import LossInputs, LossOutputs
from invrl.algorithms.objectives.example import example_inputs, try_objective
from invrl.algorithms.objectives.objectives import Needs, objective_needs
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.algorithms.policy_loss.router_shift import layer_shift, score_logprobs
from invrl.cli.checks.model_checks import check_trainable
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, PluginError
from invrl.run.settings.config import Config
from invrl.run.settings.config import resolve as resolve_settings
from invrl.types.metrics import resolve

FLOOR = 0.8
ROUTER_SHIFT = "invrl.contrib.router_shift:RouterShift"
RSPO = AlgorithmConfig(
    ratio_weight=ROUTER_SHIFT,
    plugin={"RouterShift": {"floor": FLOOR}},
    num_mini_batches=2,
    correction="none",
    dual_clip=None,
)


# ----------------------------------------------------------------- the shift


def share(logits: list[float], expert: int, score: str) -> float:
    """Of one expert in all experts' scores."""
    if score == "softmax":
        scores = [math.exp(logit - max(logits)) for logit in logits]
    else:
        scores = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    return scores[expert] / sum(scores)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_experts=st.integers(2, 9),
    num_tokens=st.integers(1, 5),
    score=st.sampled_from(["softmax", "sigmoid"]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
)
def test_shift_of_a_layer_is_over_its_chosen_experts(
    seed: int, num_experts: int, num_tokens: int, score: str, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    chosen = rng.integers(1, num_experts + 1)
    old = rng.normal(0, 2, (num_tokens, num_experts))
    current = old + rng.normal(0, spread, old.shape)
    experts = np.array(
        [rng.permutation(num_experts)[:chosen] for _ in range(num_tokens)]
    )
    expected = []
    for token in range(num_tokens):
        gaps = []
        for expert in experts[token]:
            now = share(current[token].tolist(), expert, score)
            before = share(old[token].tolist(), expert, score)
            gaps.append(abs(math.log(now) - math.log(before)))
        expected.append(sum(gaps) / len(gaps))
    experts_PK = torch.from_numpy(experts)
    current_PK = score_logprobs(torch.from_numpy(current), score).gather(1, experts_PK)
    old_PK = score_logprobs(torch.from_numpy(old), score).gather(1, experts_PK)
    np.testing.assert_allclose(
        layer_shift(current_PK, old_PK).numpy(), expected, rtol=1e-9, atol=1e-12
    )
    of_float32 = score_logprobs(torch.from_numpy(current).to(torch.bfloat16), score)
    assert of_float32.dtype == torch.float32


# ------------------------------------------------------------- the weight in the loss


def expected_loss(
    current: list[float], still: list[float], shifts: list[float], level: str
) -> float:
    """Of the example's rows: PPO's clip with a weighted ratio, or GMPO's, a mean over
    all tokens. `still`: the current log-probs where their gradient is stopped."""
    inputs = example_inputs()
    assert inputs.old_N is not None
    old = inputs.old_N.double().tolist()
    advantages = inputs.advantages_N.double().tolist()
    row_of = inputs.samples.sample_N.tolist()
    total = 0.0
    for t in range(len(current)):
        members = [s for s in range(len(current)) if row_of[s] == row_of[t]]
        weights = {s: max(math.exp(-shifts[s]), FLOOR) for s in members}
        if level == "gmpo":
            logs: list[float] = []
            for s in members:
                sign = (advantages[s] > 0) - (advantages[s] < 0)
                log_ratio = math.log(math.exp(current[s] - old[s]) * weights[s])
                logs.append(
                    sign * min(sign * log_ratio, sign * min(max(log_ratio, -0.2), 0.2))
                )
            total -= math.exp(sum(logs) / len(logs)) * advantages[t]
            continue
        if level == "token":
            ratio = math.exp(current[t] - old[t]) * weights[t]
        else:
            product = 1.0
            for s in members:
                moving = current[s] if level == "sequence" else still[s]
                product *= math.exp(moving - old[s]) * weights[s]
            ratio = product ** (1.0 / len(members))
            if level == "sequence_token":
                ratio *= math.exp(current[t] - still[t])
        clipped = min(max(ratio, 0.8), 1.2)
        total -= min(ratio * advantages[t], clipped * advantages[t])
    return total / len(current)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.1, 0.5]),
    level=st.sampled_from(["token", "sequence", "sequence_token", "gmpo"]),
)
def test_router_weight_multiplies_the_ratio_before_the_clip(
    seed: int, scale: float, level: str
) -> None:
    axis = {"policy_loss": "gmpo"} if level == "gmpo" else {"ratio_level": level}
    config = RSPO.model_copy(update=axis)
    rng = np.random.default_rng(seed)
    inputs = example_inputs()
    num_tokens = inputs.current_N.numel()
    assert inputs.old_N is not None
    old_N = inputs.old_N.double()
    current_N = (
        old_N + torch.from_numpy(rng.normal(0, 0.2, num_tokens))
    ).requires_grad_()
    shift_N = torch.from_numpy(
        rng.exponential(scale, num_tokens) if scale else np.zeros(num_tokens)
    )
    inputs = replace(
        inputs,
        current_N=current_N,
        old_N=old_N,
        rollout_N=old_N,
        advantages_N=inputs.advantages_N.double(),
        router_shift_N=shift_N,
    )
    outputs = policy_loss(inputs, config)
    outputs.loss.backward()
    current = current_N.detach().tolist()
    shifts = shift_N.tolist()
    # Float32 are the numbers of tokens of rows and the denominators; these are small
    # whole numbers.
    assert outputs.loss.item() == pytest.approx(
        expected_loss(current, current, shifts, level), abs=2e-7
    )
    assert current_N.grad is not None
    step = 1e-6
    for t in range(num_tokens):
        ends = []
        for change in (step, -step):
            moved = list(current)
            moved[t] += change
            ends.append(expected_loss(moved, current, shifts, level))
        difference = (ends[0] - ends[1]) / (2 * step)
        assert current_N.grad[t].item() == pytest.approx(difference, abs=1e-5)

    metrics = resolve(outputs.metrics)
    weights = [max(math.exp(-shift), FLOOR) for shift in shifts]
    assert metrics["router_weight_mean"] == pytest.approx(sum(weights) / len(weights))
    floored = sum(math.exp(-shift) < FLOOR for shift in shifts) / len(shifts)
    assert metrics["router_weight_floored_fraction"] == pytest.approx(floored)


def test_no_gradient_flows_through_the_router_weight() -> None:
    inputs = example_inputs(with_router_shift=True)
    assert inputs.router_shift_N is not None
    shift_N = inputs.router_shift_N.requires_grad_()
    policy_loss(inputs, RSPO).loss.backward()
    assert shift_N.grad is None
    assert inputs.current_N.grad is not None
    assert inputs.current_N.grad.abs().sum() > 0


def test_router_weight_is_1_where_old_is_current() -> None:
    inputs = replace(example_inputs(), old_N=None)
    metrics = resolve(policy_loss(inputs, RSPO).metrics)
    assert (
        metrics["router_weight_mean"]
        == metrics["ratio_mean"]
        == metrics["ratio_max"]
        == 1.0
    )
    assert metrics["router_weight_floored_fraction"] == 0.0


def test_missing_router_shift_is_an_error() -> None:
    with pytest.raises(ValueError, match="no shift of the routers is known"):
        policy_loss(example_inputs(), RSPO)


# ----------------------------------------------------------------- settings


def test_router_shift_is_needed_only_with_its_setting() -> None:
    assert objective_needs(RSPO).router_shift
    assert objective_needs(RSPO).old
    assert not objective_needs(AlgorithmConfig()).router_shift


@pytest.mark.parametrize(
    ("flags", "reason", "fix"),
    [
        ("--old-logprobs engine", "under the old policy", "--old-logprobs recompute"),
        (
            "--old-logprobs invrl.contrib.a3po:Interpolated",
            "under the old policy",
            "--old-logprobs recompute",
        ),
        ("--num-mini-batches 1", "no router moves", "--num-mini-batches to 2"),
        ("--policy-loss policy_gradient", "has no ratio", "leave it out"),
        ("--policy-loss vespo --correction none", "has no ratio", "leave it out"),
    ],
)
def test_settings_that_contradict_the_router_shift_are_refused(
    flags: str, reason: str, fix: str
) -> None:
    given_flags = ["--ratio-weight", ROUTER_SHIFT, *flags.split()]
    if "--num-mini-batches" not in given_flags:
        given_flags += ["--num-mini-batches", "2"]
    with pytest.raises(ConfigError, match=r"ratio_weight") as refusal:
        resolve_settings(*parse_flags(given_flags))
    assert reason in str(refusal.value)
    assert fix in str(refusal.value)


def of_run(model: Path, *flags: str) -> Config:
    return resolve_settings(
        *parse_flags(
            [
                "--model-path",
                str(model),
                "--ratio-weight",
                ROUTER_SHIFT,
                *flags,
                "--num-mini-batches=2",
            ]
        )
    )


def test_router_shift_of_a_dense_model_is_refused_before_any_process_starts(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "dense")
    with pytest.raises(
        ConfigError,
        match=r"(?s)has no experts.*--ratio-weight",
    ):
        check_trainable(of_run(model))


def test_router_shift_with_pipeline_stages_is_refused_before_any_process_starts(
    tmp_path: Path,
) -> None:
    model = make_family_model(tmp_path / "experts", "qwen3_moe", num_hidden_layers=2)
    check_trainable(of_run(model))
    with pytest.raises(
        ConfigError,
        match=r"(?s)pipeline_model_parallel_size.*last stage.*one pipeline stage",
    ):
        check_trainable(of_run(model, "--pipeline-model-parallel-size", "2"))


def of_shift(inputs: LossInputs) -> LossOutputs:
    assert inputs.router_shift_N is not None
    return LossOutputs(
        loss=(inputs.current_N * inputs.router_shift_N).sum(), metrics={}
    )


def without_old(inputs: LossInputs) -> LossOutputs:
    return of_shift(inputs)


of_shift.needs = Needs(old=True, router_shift=True)
without_old.needs = Needs(router_shift=True)


def test_user_objective_declares_the_router_shift_together_with_old() -> None:
    try_objective(AlgorithmConfig(objective=f"{__name__}:of_shift"))
    with pytest.raises(PluginError, match=r"(?s)not `old`.*old=True"):
        objective_needs(AlgorithmConfig(objective=f"{__name__}:without_old"))
