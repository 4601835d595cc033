"""Settings of the loss's axes: what contradicts, what may not be meant, and what a
policy loss of the user's must return."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks_by_name import run_check

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.objectives.example import (
    example_inputs,
    example_inputs_of,
    with_sample_numbers,
)
from invrl.algorithms.objectives.objectives import objective_needs
from invrl.algorithms.policy_loss.axis_plugins import load_sample_weight
from invrl.algorithms.policy_loss.losses import policy_loss
from invrl.algorithms.policy_loss.policy_losses import POLICY_LOSSES
from invrl.algorithms.presets import PRESETS
from invrl.cli.checks.check_warnings import CheckWarning
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError, PluginError
from invrl.run.settings.config import Config, resolve
from invrl.types.metrics import resolve as resolve_metrics

ENGINE = ("--old-logprobs", "engine")
SIMKO = "invrl.contrib.simko:SimKO"
LENGTHS = "invrl.contrib.lambda_grpo:LengthWeight"
LEARNED = "invrl.contrib.lambda_grpo:LearnedExponent"
KL = "invrl.contrib.adaptive_kl:AdaptiveKL"
ENTROPY = "invrl.contrib.adaptive_entropy:AdaptiveEntropy"


def from_flags(*flags: str) -> Config:
    return resolve(*parse_flags(flags))


@pytest.mark.parametrize(
    ("flags", "field", "reason", "fix"),
    [
        (
            "--ratio-level sequence",
            "correction",
            "one number for all tokens",
            "geometric_truncated",
        ),
        (
            "--ratio-level sequence_token",
            "correction",
            "one number for all tokens",
            "geometric_truncated",
        ),
        (
            "--ratio-level sequence --correction none --rejection token --rejection.high 2",
            "kind",
            "one number for all tokens",
            "--rejection geometric",
        ),
        (
            "--ratio-level sequence --policy-loss dppo_tv",
            "ratio_level",
            "masks single tokens",
            "leave",
        ),
        (
            "--ratio-level sequence --policy-loss policy_gradient",
            "ratio_level",
            "has no ratio",
            "leave",
        ),
        (
            "--policy-loss gmpo",
            "correction",
            "one number for all tokens",
            "geometric_truncated",
        ),
        (
            "--policy-loss gmpo --ratio-level sequence",
            "ratio_level",
            "clips the ratios of single",
            "leave",
        ),
        ("--policy-loss vespo", "correction", "count twice", "--correction none"),
        (
            "--correction-floor 3",
            "correction_floor",
            "above correction_cap = 2",
            "--correction-cap",
        ),
        ("--rejection token", "kind", "neither bound", "--rejection.high"),
        (
            f"--sample-weight {LENGTHS} --n-samples-per-prompt 1 --advantage raw --group-filter none",
            "n_samples_per_prompt",
            "every weight is 1",
            "2 or more",
        ),
        (
            "--algorithm-preset lambda_grpo --n-samples-per-prompt 128",
            "scale",
            "so short that 1 + r z is not above 0",
            "below 0.08908",
        ),
        (
            f"--objective sft --data-path rows.jsonl --sample-weight {LENGTHS}",
            "sample_weight",
            "the objective sft does not read it",
            "leave it out",
        ),
        (
            f"--sample-weight {LENGTHS} --plugin.LengthWeight.exponent 101",
            "exponent",
            "100",
            "lower it",
        ),
        (
            f"--sample-weight {LENGTHS}",
            "exponent",
            "not learned",
            "--adaptations invrl.contrib.lambda_grpo:LearnedExponent",
        ),
        (
            f"--adaptations {LEARNED} --plugin.LearnedExponent.lr 1",
            "sample_weight",
            "no exponent",
            LENGTHS,
        ),
        (
            f"--adaptations {KL} --plugin.AdaptiveKL.target 0.1",
            "coefficient",
            "no KL",
            "--kl.coefficient",
        ),
        (
            f"--policy-loss {SIMKO} --rollout-top-logprobs 3 --ratio-level sequence --correction none",
            "ratio_level",
            "single tokens",
            "leave",
        ),
        (
            "--policy-loss invrl.contrib.dppo_topk:DPPODivergence --rollout-top-logprobs 3 "
            "--ratio-level sequence --correction none",
            "ratio_level",
            "single tokens",
            "leave",
        ),
        ("--plugin.SimKO.alpha 0.1", "SimKO", "no user code", "leave [plugin.SimKO]"),
        ("--rejection.high 2", "kind", "required", "give rejection.kind too"),
        ("--rejection token --rejection.high 1", "high", "greater than 1", "is kept"),
        ("--rejection token --rejection.low 1", "low", "less than 1", "is kept"),
        (
            "--rejection token --rejection.low 5 --rejection.high 0.5",
            "low",
            "less than 1",
            "is kept",
        ),
        ("--kl.estimator k1", "coefficient", "required", "give kl.coefficient too"),
        (
            "--kl.coefficient 0.1 --kl.estimator k1",
            "estimator",
            "only noise",
            "--kl.added-to reward",
        ),
        (
            "--kl.coefficient 0.1 --kl.estimator unbiased --kl.added-to reward",
            "estimator",
            "gradient",
            "k1",
        ),
        (
            "--kl.coefficient 0.1 --kl.estimator unbiased --kl.added-to rollout_reward",
            "estimator",
            "gradient",
            "k1",
        ),
        (
            "--kl.coefficient 0.1 --kl.estimator k1 --kl.added-to rollout_reward",
            "added_to",
            "linear",
            "--advantage rloo",
        ),
        (
            "--kl.coefficient 0.1 --kl.estimator k1 --kl.added-to rollout_reward --advantage rloo "
            "--advantage-whitening tokens",
            "advantage_whitening",
            "without the KL",
            "leave it out",
        ),
        ("--entropy", "coefficient", "required", "give entropy.coefficient too"),
        (
            "--reference.reset-optimizer",
            "reset_optimizer",
            "nothing is reset",
            ".reset-steps",
        ),
        (
            "--objective distillation --solved-nll-coef 0.1",
            "solved_nll_coef",
            "does not read",
            "leave",
        ),
        *(
            (
                f"--objective distillation --{flag}",
                field,
                "does not read it, only rl",
                "leave",
            )
            for flag, field in (
                ("advantage-std.eps 0.1", "eps"),
                ("advantage-std.estimator population", "estimator"),
            )
        ),
        ("--reference.ema 0.9", "ema", "no reference", "--kl.coefficient"),
        (
            "--reference.reset-steps 9",
            "reset_steps",
            "no reference",
            "--kl.coefficient",
        ),
        (
            "--kl.coefficient 1 --reference.reset-steps 9 --reference.ema 0.9",
            "ema",
            "exclude",
            "one of",
        ),
        (
            "--kl.coefficient 1 --reference.reset-steps 9 --reference-placement cpu_by_layer",
            "reference_placement",
            "dtype of its folder",
            "cpu or device",
        ),
        ("--dual-clip 0.5", "dual_clip", "greater than 1", "bound of the ratio"),
        (
            "--routing-replay trainer --num-mini-batches 2 --old-logprobs invrl.contrib.a3po:Interpolated",
            "routing_replay",
            "no pass",
            "recompute",
        ),
    ],
)
def test_contradicting_loss_axes_are_refused(
    flags: str, field: str, reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*flags.split())
    assert caught.value.field.endswith(f".{field}")
    assert reason in caught.value.reason
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    "flags",
    [
        "--ratio-level sequence --correction none",
        "--ratio-level sequence --correction sequence_truncated --rejection geometric --rejection.high 1.001",
        "--policy-loss vespo --correction none",
        "--kl.coefficient 0.1 --kl.estimator k1 --kl.added-to reward",
        "--algorithm-preset lambda_grpo --n-samples-per-prompt 82",
        f"--sample-weight {LENGTHS} --plugin.LengthWeight.exponent -2 --aggregation rollout_mean",
        f"--objective distillation --sample-weight {LENGTHS} --plugin.LengthWeight.exponent 1 "
        "--teacher.model-path x --group-filter none",
        f"--adaptations {ENTROPY} --plugin.AdaptiveEntropy.ceiling 0.2",
        f"--adaptations {ENTROPY},{KL} --plugin.AdaptiveEntropy.target 0.1 "
        "--plugin.AdaptiveEntropy.ceiling 0.2 --plugin.AdaptiveEntropy.step 0.1 "
        "--plugin.AdaptiveKL.target 0.1 --kl.coefficient 0.1",
        "--algorithm-preset lambda_grpo --sample-weight invrl.contrib.lambda_grpo:LengthWeight "
        "--plugin.LengthWeight.exponent 1",
        "--algorithm-preset rspo --no-ratio-weight",
        "--kl.coefficient 0.1 --kl.estimator k1 --kl.added-to rollout_reward --advantage rloo",
        "--rejection token --rejection.low 0.5",
    ],
)
def test_compatible_loss_axes_are_accepted(flags: str) -> None:
    from_flags(*flags.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy-loss", "cispo"], ["the clip"]),
        (["--policy-loss", "sapo"], []),
        (["--policy-loss", "rejection_gate"], []),
        (
            [*ENGINE, "--rejection", "token", "--rejection.high", "2"],
            ["the truncated", "the token"],
        ),
        (["--old-logprobs", "invrl.contrib.a3po:Interpolated"], []),
        (["--algorithm-preset", "lambda_grpo", "--num-mini-batches", "2"], []),
    ],
)
def test_loss_settings_without_effect_are_listed(
    flags: list[str], words: list[str]
) -> None:
    sentences = from_flags(*flags).algorithm.without_effect()
    assert [" ".join(sentence.split()[:2]) for sentence in sentences] == words


@pytest.mark.parametrize(
    "flags",
    [
        "--max-staleness 2",
        "--correction none",
        "--max-staleness 2 --correction none --rejection token --rejection.high 2",
        "--max-staleness 2 --correction none --old-logprobs engine",
        "--max-staleness 2 --correction none --policy-loss vespo",
        "--max-staleness 2 --old-logprobs invrl.contrib.a3po:Interpolated",
    ],
)
def test_settings_that_correct_for_old_tokens_pass_the_check(flags: str) -> None:
    run_check("off-policy correction", from_flags(*flags.split()))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--max-staleness 2 --correction none", "may be 2 versions old"),
        ("--old-logprobs invrl.contrib.a3po:Interpolated", "no token is old"),
    ],
)
def test_uncorrected_old_tokens_raise_a_doubt(flags: str, reason: str) -> None:
    with pytest.raises(CheckWarning, match=reason):
        run_check("off-policy correction", from_flags(*flags.split()))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_loss_of_each_preset_can_be_computed(name: str) -> None:
    """All its settings but the advantage, on the example."""
    algorithm = from_flags("--algorithm-preset", name).algorithm
    assert algorithm.policy_loss in POLICY_LOSSES
    inputs = example_inputs_of(objective_needs(algorithm))
    sample_weight = load_sample_weight(algorithm)
    if sample_weight is not None:
        inputs = with_sample_numbers(inputs, sample_weight)
    policy_loss(inputs, algorithm).loss.backward()
    assert inputs.current_N.grad is not None
    assert torch.isfinite(inputs.current_N.grad).all()
    assert inputs.current_N.grad.any()


# -------------------------------------------------------- a policy loss of the user's

LOSSES = """
from pydantic import PositiveFloat
from invrl.algorithms.policy_loss.policy_losses import TokenLosses
from invrl.errors import ConfigError
from invrl.types.section import Section

def good(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return -ratio_N * advantages_N

def with_inputs(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high, inputs=None):
    assert inputs.rollout_N.shape == ratio_N.shape
    return -ratio_N * advantages_N * inputs.samples.spread(inputs.samples.tokens_R)

def of_own_column(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high, inputs=None):
    return -ratio_N * inputs.columns["mine"]

def through_inputs(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high, inputs=None):
    return -inputs.current_N * advantages_N

def a_mean(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return -(ratio_N * advantages_N).mean()

def a_number(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return 0.5

def without_gradient(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return -ratio_N.detach() * advantages_N

def not_a_number(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return (ratio_N - 100.0).log()

def slope_of_root(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return (advantages_N.abs() * ratio_N).sqrt()

class SoftLoss(Section):
    width: PositiveFloat = 0.4

    def check(self, config):
        if config.algorithm.ratio_level != "token":
            raise ConfigError("algorithm.ratio_level", config.algorithm.ratio_level, "of tokens alone", "leave it out")

    def __call__(self, of):
        far_N = (of.ratio_N - 1).abs() > self.width
        return TokenLosses(losses_N=-of.ratio_N * of.advantages_N * self.width, means={"far": far_N})

def raises(ratio_N, advantages_N, *, eps_clip_low, eps_clip_high):
    return ratio_N @ advantages_N[:-1]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "losses_of_mine.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["good", "with_inputs", "through_inputs"])
def test_trainable_policy_loss_passes_the_check(here: Path, name: str) -> None:
    run_check(
        "algorithm functions", from_flags("--policy-loss", f"losses_of_mine:{name}")
    )
    outputs = policy_loss(
        example_inputs(), AlgorithmConfig(policy_loss=f"losses_of_mine:{name}")
    )
    assert outputs.loss.requires_grad


@pytest.mark.usefixtures("here")
def test_policy_loss_sees_the_inputs_of_the_micro_batch() -> None:
    inputs = example_inputs()
    outputs = policy_loss(
        inputs,
        AlgorithmConfig(policy_loss="losses_of_mine:with_inputs", correction="none"),
    )
    assert inputs.old_N is not None
    ratio_N = (inputs.current_N - inputs.old_N).exp()
    expected = (
        -(
            ratio_N * inputs.advantages_N * torch.tensor([5.0] * 5 + [3.0] * 3 + [1.0])
        ).sum()
        / 9
    )
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.usefixtures("here")
def test_policy_loss_may_read_a_column_that_only_a_run_has() -> None:
    run_check(
        "algorithm functions",
        from_flags("--policy-loss", "losses_of_mine:of_own_column"),
    )


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("a_mean", r"a tensor of shape \[\] for 9 tokens", "one loss per token"),
        ("a_number", "returned float, not a tensor", "one loss per token"),
        ("without_gradient", "it has no gradient", "computed from ratio_N"),
        ("not_a_number", "returned nan", "make it work"),
        ("slope_of_root", "a gradient of (nan|inf)", "make it work"),
        ("raises", "raised RuntimeError", "make it work"),
    ],
)
def test_untrainable_policy_loss_is_refused_before_a_process_starts(
    here: Path, name: str, reason: str, fix: str
) -> None:
    config = from_flags("--policy-loss", f"losses_of_mine:{name}")
    with pytest.raises(PluginError, match=reason) as caught:
        run_check("algorithm functions", config)
    assert caught.value.field == "policy_loss"
    assert caught.value.value == f"losses_of_mine:{name}"
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", ["a_mean", "a_number", "without_gradient"])
@pytest.mark.usefixtures("here")
def test_untrainable_policy_loss_is_refused_in_a_step(name: str) -> None:
    """Also where the check could not see it: a shape may depend on the batch."""
    with pytest.raises(PluginError, match="policy_loss"):
        policy_loss(
            example_inputs(), AlgorithmConfig(policy_loss=f"losses_of_mine:{name}")
        )


@pytest.mark.usefixtures("here")
def test_policy_loss_of_a_user_has_settings_and_metrics_of_its_own() -> None:
    flags = ("--policy-loss", "losses_of_mine:SoftLoss", "--correction", "none")
    config = from_flags(*flags, "--plugin.SoftLoss.width", "0.25")
    run_check("algorithm functions", config)
    plain = policy_loss(example_inputs(), from_flags(*flags).algorithm)
    outputs = policy_loss(example_inputs(), config.algorithm)
    assert outputs.loss.item() == pytest.approx(plain.loss.item() * 0.25 / 0.4)
    assert 0.0 < resolve_metrics(outputs.metrics)["far"] <= 1.0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--plugin.SoftLoss.widht 1", "has no setting 'widht'"),
        ("--plugin.SoftLoss.width -1", "greater than 0"),
        ("--plugin.Other.width 1", "no user code"),
        (
            "--plugin.SoftLoss.width 1 --ratio-level sequence --correction none",
            "of tokens alone",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_wrong_settings_of_user_code_are_refused(flags: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags("--policy-loss", "losses_of_mine:SoftLoss", *flags.split())
    assert reason in caught.value.reason


@pytest.mark.usefixtures("here")
def test_settings_for_a_function_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="it has no settings"):
        from_flags("--policy-loss", "losses_of_mine:good", "--plugin.good.width", "1")
