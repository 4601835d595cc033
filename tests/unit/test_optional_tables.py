"""Optional settings and tables: what turns them on and off, and what configurations of
earlier versions mean."""

from pathlib import Path

import pytest
import tomli_w

from invrl.algorithms.policy_loss.axis_plugins import axis_plugins
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.run.settings.config import (
    SECTIONS,
    TABLES,
    Config,
    Source,
    default_settings,
    optional_table_sections,
    read_toml,
    resolve,
)
from invrl.run.settings.former_settings import as_written_now
from invrl.run.settings.resolved_config import _checksum, load_resolved, write_resolved


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


def test_no_setting_of_this_version_is_read_as_one_of_an_earlier_version() -> None:
    written = {name: default_settings(name) for name in (*SECTIONS, *TABLES)}
    written["late"]["deadline_s"] = 60.0  # it has no default
    assert as_written_now(written, optional_table_sections()) == written


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
        (("--simpo-gamma", "1"), "write --simpo.gamma"),
        (("--advantage-eps", "1e-6"), "write --advantage-std.eps"),
        (("--seeded-sampling",), "write --engine.seeded-sampling"),
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


def test_a_recorded_configuration_of_an_earlier_version_means_what_it_meant() -> None:
    recorded = {
        "run": {"run_name": "r", "keep_checkpoints": 0, "wandb_project": ""},
        "train": {"critic_lr": 1e-5, "clip_grad": 1.0, "critic_warmup_steps": 0},
        "rollout": {"curriculum": "thompson", "curriculum_tasks": 0},
        "algorithm": {
            "objective": "dpo",
            "policy_loss": "clip",
            "preference_beta": 0.3,
            "label_smoothing": 0.0,
            "simpo_beta": 2.0,
            "advantage": "grpo",
            "kl_coef": 0.0,
            "kl_estimator": "k3",
            "rejection": "none",
            "rejection_high": 0.0,
        },
    }
    section_of_table = optional_table_sections()
    now = as_written_now(recorded, section_of_table)
    assert now["run"] == {"run_name": "r", "wandb": False}
    assert now["checkpoints"] == {"keep": False}
    assert now["curriculum"] == {"kind": "thompson", "tasks": False}
    assert now["dpo"] == {"beta": 0.3, "label_smoothing": 0.0}
    assert now["train"] == {"clip_grad": 1.0, "lora": False}
    assert {"kl", "critic", "simpo", "rejection"}.isdisjoint(now)
    assert now["algorithm"]["kl"] is False
    assert as_written_now(now, section_of_table) == now


def test_settings_that_moved_or_are_gone_are_read_from_a_recorded_configuration(
    tmp_path: Path,
) -> None:
    recorded = {
        "run": {"ray_start_attempts": 9, "seed": 3},
        "engine": {"seeded_sampling": True},
        "gateway": {"special_tokens_in_content": "control"},
        "algorithm": {
            "advantage_eps": 1e-6,
            "advantage_std_floor": 0.1,
            "reward_deviation": "population",
            "num_mini_batches": 4,
        },
    }
    file = tmp_path / "config.resolved.toml"
    file.write_text(tomli_w.dumps(recorded))
    config = load_resolved(file)
    assert config == from_flags(
        *("--seed", "3"),
        "--engine.seeded-sampling",
        *("--gateway.special-tokens-in-content", "control"),
        *("--advantage-std.eps", "1e-6"),
        *("--advantage-std.floor", "0.1"),
        *("--advantage-std.estimator", "population"),
        *("--num-mini-batches", "4"),
    )
    file.rename(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match="a run starts its Ray up to four times"):
        resolve(read_toml(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("recorded", "paths", "tables"),
    [
        (
            {"policy_loss": "simko", "simko": {"alpha": 0.3}},
            ["SimKO"],
            {"SimKO": {"alpha": 0.3}},
        ),
        (
            {"policy_loss": "dppo_kl_topk", "dppo": {"threshold": 0.05}},
            ["DPPODivergence"],
            {"DPPODivergence": {"threshold": 0.05}},
        ),
        (
            {
                "policy_loss": "dppo_tv_topk",
                "dppo_threshold": 0.05,
                "simko_alpha": 0.01,
            },
            ["DPPOTotalVariation"],
            {"DPPOTotalVariation": {"threshold": 0.05}},
        ),
        ({"old_logprobs": "interpolated"}, ["Interpolated"], {}),
        (
            {"algorithm_preset": "rspo", "router_shift_floor": 0.9},
            ["RouterShift"],
            {"RouterShift": {"floor": 0.9}},
        ),
        ({"algorithm_preset": "rspo", "router_shift_floor": False}, [], {}),
        (
            {"length_weights": {"exponent": 2.0, "lr": 0.1, "scale": 0.2}},
            ["LengthWeight", "LearnedExponent"],
            {
                "LengthWeight": {"exponent": 2.0, "scale": 0.2},
                "LearnedExponent": {"lr": 0.1},
            },
        ),
        (
            {
                "length_weighting": "lambda_grpo",
                "length_lambda": 1.0,
                "length_lambda_lr": 0.0,
            },
            ["LengthWeight"],
            {"LengthWeight": {"exponent": 1.0}},
        ),
        (
            {
                "algorithm_preset": "lambda_grpo",
                "length_weights": {"exponent": 0.0, "lr": 0.0},
            },
            [],
            {},
        ),
        (
            {
                "kl": {"coefficient": 0.1, "target": 0.05},
                "entropy": {"coefficient": 0.0, "ceiling": 0.4, "step": 0.01},
            },
            ["AdaptiveKL", "AdaptiveEntropy"],
            {
                "AdaptiveKL": {"target": 0.05},
                "AdaptiveEntropy": {"ceiling": 0.4, "step": 0.01},
            },
        ),
        ({"entropy": {"coefficient": 0.1, "step": 0.005}}, [], {}),
    ],
)
def test_a_recorded_configuration_names_what_was_built_in(
    recorded: dict[str, object],
    paths: list[str],
    tables: dict[str, dict[str, float]],
    tmp_path: Path,
) -> None:
    """Settings of [algorithm], and tables beside it."""
    written = {
        "algorithm": {"num_mini_batches": 4, "correction": "geometric_truncated"}
    }
    for name, value in recorded.items():
        if isinstance(value, dict):
            written[name] = value
        else:
            written["algorithm"][name] = value
    file = tmp_path / "config.resolved.toml"
    file.write_text(tomli_w.dumps(written))
    flags = Source(name="flags", tables={"rollout": {"rollout_top_logprobs": 3}})
    algorithm = resolve(read_toml(file), flags).algorithm
    named = [plugin.path.partition(":")[2] for plugin in axis_plugins(algorithm)]
    assert named == paths
    assert algorithm.plugin.by_name == tables


def test_a_recorded_transport_keeps_its_own_settings_alone() -> None:
    recorded = {
        "weight_sync": {
            "weight_transport": "disk",
            "weight_folder": "/shared",
            "weight_host": False,
            "weight_full_every": 16,
            "weight_arena": "copy",
            "weight_sync_timeout_s": 9.0,
        },
        "gateway": {"gateway_port": 8000, "session_ttl_s": 5.0, "late_reward": "drop"},
        "sglang": {"log_level": "info"},
    }
    now = as_written_now(recorded, optional_table_sections())
    assert now == {
        "weights": {
            "transport": "disk",
            "folder": "/shared",
            "host": False,
            "timeout_s": 9.0,
        },
        "gateway": {"port": 8000},
        "session": {"ttl_s": 5.0},
        "sglang": {"log_level": "info"},
    }
    assert as_written_now(now, optional_table_sections()) == now


def test_a_recorded_file_is_checked_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "config.resolved.toml"
    written = {"keep_checkpoints": 3, "log_level": "debug"}
    checksums = " ".join(_checksum(*item) for item in written.items())
    path.write_text(
        f"# xxh3 of [run]: {checksums}\n\n"
        '[run]\nkeep_checkpoints = 3\nlog_level = "debug"\n'
    )
    run = load_resolved(path).run
    assert run.checkpoints.keep == 3
    assert run.log.level == "debug"


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
