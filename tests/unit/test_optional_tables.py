"""Optional settings and tables: what turns them on and off, and how names of earlier
versions are refused."""

from pathlib import Path

import pytest

from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.resolved_config import load_resolved, write_resolved


def from_flags(*flags: str) -> Config:
    return resolve(*parse_flags(flags))


def test_one_flag_of_a_table_turns_it_on() -> None:
    critic = from_flags("--critic.model-path", "folder").algorithm.critic
    assert critic is not None
    assert (critic.model_path, critic.lr) == ("folder", 1e-5)
    assert from_flags("--critic.lr", "1e-4").algorithm.advantage == "gae"
    gate = from_flags("--gate", "--rollout-timeout-s", "900").gateway.gate
    assert gate is not None
    assert gate.policy == "program"
    curriculum = from_flags("--curriculum", "thompson").rollout.curriculum
    assert curriculum is not None
    assert curriculum.kind == "thompson"


@pytest.mark.parametrize("flags", [(), ("--kl.coefficient", "0.2", "--no-kl")])
def test_a_table_that_is_absent_or_turned_off_is_none(flags: tuple[str, ...]) -> None:
    config = from_flags(*flags)
    assert config.algorithm.kl is None
    assert "kl" not in config.settings()


def test_a_flag_turns_off_what_a_file_or_a_preset_sets(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[wandb]\nproject = "p"\n\n[train]\nmax_sample_tokens = 64\n')
    config = from_flags("--config", str(file), "--no-wandb", "--no-max-sample-tokens")
    assert config.run.wandb is None
    assert config.train.max_sample_tokens is None
    config = from_flags(
        "--algorithm-preset", "ppo", "--no-kl", "--no-critic.value-clip"
    )
    assert config.algorithm.kl is None
    assert config.algorithm.critic is not None
    assert config.algorithm.critic.value_clip is None


def test_false_in_a_file_turns_off_what_a_default_turns_on(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nclip_grad = false\n\n[algorithm]\ndual_clip = false\n")
    config = from_flags("--config", str(file))
    assert (config.train.clip_grad, config.algorithm.dual_clip) == (None, None)


@pytest.mark.parametrize(
    "flags",
    [
        ("--algorithm-preset", "ppo", "--no-kl", "--no-dual-clip"),
        ("--algorithm-preset", "sapo", "--policy-loss", "clip"),
        ("--group-filter", "medium_difficulty", "--no-checkpoints.keep"),
        ("--rejection", "token", "--rejection.high", "2", "--wandb.project", "p"),
    ],
)
def test_a_recorded_configuration_reads_back_equal(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = from_flags(*flags)
    file = tmp_path / "config.resolved.toml"
    write_resolved(file, config)
    assert load_resolved(file) == config


def test_a_table_beside_a_choice_that_does_not_read_it_is_refused() -> None:
    without_critic = Source(name="file", tables={"algorithm": {"critic": False}})
    with pytest.raises(ConfigError, match=r"does not read the table \[vespo\]"):
        from_flags("--policy-loss", "sapo", "--vespo.power-positive", "1")
    with pytest.raises(ConfigError, match=r"needs the table \[critic\]"):
        resolve(without_critic, *parse_flags(["--advantage", "gae"]))


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--critic", "write --advantage gae"),
        ("--no-critic", "write --advantage with a value other than gae"),
        ("--dppo", "write --policy-loss dppo_tv or dppo_kl"),
        ("--kto", "write --objective kto"),
        ("--rejection-gate", "write --policy-loss rejection_gate"),
        ("--no-difficulty", "--group-filter with a value other than medium_difficulty"),
    ],
)
def test_a_table_that_a_choice_reads_is_turned_on_by_the_choice_alone(
    flag: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(flag)
    assert fix in caught.value.fix


def test_a_table_without_the_setting_that_it_needs_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags("--kl.estimator", "k2")
    assert caught.value.field == "kl.coefficient"
    assert "give kl.coefficient too" in caught.value.fix


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("--checkpoints.keep", "0"), "--no-checkpoints.keep"),
        (("--run-name", ""), "leave it out"),
        (("--kl-coef", "0.1"), "write --kl.coefficient"),
        (("--simpo-gamma", "1"), "did you mean --simpo.gamma?"),
        (("--advantage-eps", "1e-6"), "write --advantage-std.eps"),
        (("--seeded-sampling",), "did you mean --engine.seeded-sampling?"),
        (
            ("--ray-start-attempts", "9"),
            "leave it out: a run starts its Ray up to four",
        ),
        (
            ("--policy-loss", "simko"),
            "write --policy-loss invrl.contrib.simko:SimKO",
        ),
        (
            ("--old-logprobs", "interpolated"),
            "write --old-logprobs invrl.contrib.a3po:Interpolated",
        ),
        (
            ("--simko.top1-weight", "2"),
            "write --policy-loss invrl.contrib.simko:SimKO --plugin.SimKO.top1-weight",
        ),
        (
            ("--router-shift-floor", "0.8"),
            "write --ratio-weight invrl.contrib.router_shift:RouterShift --plugin.RouterShift.floor",
        ),
        (
            ("--length-weights.lr", "0.1"),
            "write --adaptations invrl.contrib.lambda_grpo:LearnedExponent --plugin.LearnedExponent.lr",
        ),
        (
            ("--kl-target", "0.1"),
            "write --adaptations invrl.contrib.adaptive_kl:AdaptiveKL --plugin.AdaptiveKL.target",
        ),
    ],
)
def test_values_and_names_of_earlier_versions_are_refused_with_the_new_ones(
    flags: tuple[str, ...], fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*flags)
    assert fix in caught.value.fix


def test_a_recorded_configuration_of_an_earlier_version_is_refused_with_the_new_name(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.resolved.toml"
    file.write_text("[algorithm]\nkl_coef = 0.1\n")
    with pytest.raises(ConfigError) as caught:
        load_resolved(file)
    assert "write coefficient, in table [kl]" in caught.value.fix
    file.write_text("[run]\nray_start_attempts = 9\n")
    with pytest.raises(ConfigError, match="a run starts its Ray up to four times"):
        load_resolved(file)


@pytest.mark.parametrize(
    ("flags", "field", "fix"),
    [
        (
            ("--weights.folder", "/shared"),
            "weights.folder",
            "add --weights.transport disk or delta",
        ),
        (
            ("--weights.transport", "bucket", "--weights.arena-mode", "alias"),
            "weights.arena_mode",
            "add --weights.transport arena",
        ),
        (
            ("--weights.transport", "dsik"),
            "weights.transport",
            "did you mean disk?",
        ),
    ],
)
def test_a_setting_of_another_transport_is_refused(
    flags: tuple[str, ...], field: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*flags)
    assert caught.value.field == field
    assert fix in caught.value.fix
