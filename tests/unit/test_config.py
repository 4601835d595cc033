"""The configuration tree: its sources, its errors, and that it needs nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Union, get_args, get_origin

import pytest
from checks_by_name import USER_CODE, run_check

from invrl.algorithms.config import AlgorithmConfig
from invrl.algorithms.presets import PRESETS
from invrl.algorithms.tables import KlConfig
from invrl.cli.flag_help import flag_help
from invrl.cli.flags import SETTING_FLAGS, parse_flags
from invrl.engines.client.sglang_client import EngineLimits
from invrl.errors import ConfigError, PluginError
from invrl.gateway.config import GatewayConfig, LateConfig
from invrl.gateway.server.settings import GatewaySettings
from invrl.rollout.tasks.tasks import held_out_only
from invrl.run.incarnations.incarnation import run_incarnation
from invrl.run.settings.config import (
    SECTIONS,
    UPSTREAM,
    Config,
    Source,
    read_toml,
    resolve,
)
from invrl.run.settings.folder import make_run_folder
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder
from invrl.types.section import present_type

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "invrl" / "presets").glob("*.toml"))


def from_flags(*flags: str) -> Config:
    return resolve(*parse_flags(flags))


def make_checks(config: Config, names: tuple[str, ...]) -> None:
    for name in names:
        run_check(name, config)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_setting_names_are_unique_across_sections() -> None:
    counts = Counter(leaf.name for leaf in SETTING_FLAGS)
    assert [key for key, count in counts.items() if count > 1] == []


def test_fewer_than_120_flags_have_no_table_before_them() -> None:
    plain = [leaf.name for leaf in SETTING_FLAGS if "." not in leaf.name]
    assert len(plain) < 120


def test_every_setting_has_a_flag_and_a_line_of_help() -> None:
    text = flag_help()
    other = {"str": "x", "int": "2", "float": "0.5", "tuple": "x"}
    for leaf in SETTING_FLAGS:
        assert leaf.field.description, leaf.key
        assert leaf.flag in text
        if leaf.is_table and not leaf.takes_value:
            (source,) = parse_flags([leaf.flag])
            assert source.tables == {leaf.table: {}}
            continue
        if leaf.is_switch:
            arguments = [f"--no-{leaf.flag[2:]}"]
            value = False
        else:
            value_type = present_type(leaf.field)
            if get_origin(value_type) is Union:  # a number, or a word
                value_type = get_args(value_type)[-1]
            literal = get_origin(value_type) is Literal
            shown_value = (
                get_args(value_type)[-1]
                if literal
                else other[getattr(value_type, "__name__", "str")]
            )
            arguments = [leaf.flag, shown_value]
            value = shown_value
        (source,) = parse_flags(arguments)
        assert source.tables == {leaf.table: {leaf.key: value}}


def test_configuration_imports_neither_torch_ray_sglang_nor_transformers() -> None:
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ray", "sglang", "transformers", "megatron", "sglang_router"}:
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
import invrl.cli.main, invrl.user_code.model_folder, invrl.run.settings.folder
import invrl.observe.sinks.sinks, invrl.observe.screen.progress
from invrl.run.settings.config import resolve
from invrl.types.section import present_type
print(resolve().run.num_steps)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "100"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_file_loads_and_repeats_no_default(path: Path) -> None:
    config = resolve(read_toml(path))
    for table, entries in tomllib.loads(path.read_text()).items():
        settings = config.settings()[table]
        assert {key: settings[key] for key in entries} == entries


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_preset_file_names_existing_code_and_tasks(
    path: Path, tmp_path: Path
) -> None:
    sources = [read_toml(path)]
    if "task_source_path" not in sources[0].tables["rollout"]:  # its tasks come by flag
        tasks = write(tmp_path / "tasks.jsonl", '{"question": "2+2?", "label": 4}\n')
        sources += parse_flags(["--task-file", str(tasks)])
    make_checks(resolve(*sources), USER_CODE)


def test_quickstart_preset_has_the_measured_settings() -> None:
    config = load_resolved(ROOT / "invrl" / "presets" / "quickstart.toml")
    rollout = config.rollout
    train = config.train
    assert rollout.rollout_batch_size == 4
    assert rollout.n_samples_per_prompt == 8
    assert rollout.max_new_tokens == 14
    assert train.lr == 3e-5
    assert train.adam_beta1 == 0.9
    assert train.adam_beta2 == 0.99
    assert train.clip_grad == 1.0
    assert config.algorithm.kl is None
    assert config.algorithm.num_mini_batches == 1
    assert rollout.eval.tasks >= 100
    make_checks(config, USER_CODE)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_algorithm_preset_is_valid_and_below_the_other_sources(
    name: str, tmp_path: Path
) -> None:
    config = from_flags("--algorithm-preset", name)
    alone = AlgorithmConfig.model_validate(PRESETS[name])
    assert config.algorithm == alone.model_copy(update={"algorithm_preset": name})
    file = write(
        tmp_path / "c.toml", "[algorithm]\neps_clip_low = 0.11\neps_clip_high = 0.12\n"
    )
    config = from_flags(
        "--config", str(file), "--eps-clip-high", "0.13", "--algorithm-preset", name
    )
    assert config.algorithm.eps_clip_low == 0.11
    assert config.algorithm.eps_clip_high == 0.13


def test_a_preset_named_by_a_flag_replaces_the_one_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", '[algorithm]\nalgorithm_preset = "grpo"\n')
    kl = from_flags("--config", str(file)).algorithm.kl
    assert kl == KlConfig(coefficient=0.04)
    assert (
        from_flags(
            "--config", str(file), "--algorithm-preset", "dapo"
        ).algorithm.eps_clip_high
        == 0.28
    )


def test_flags_win_over_toml_over_defaults(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.toml",
        "[train]\nlr = 0.5\nclip_grad = 2.0\n[metrics]\ntensorboard = false\n",
    )
    config = from_flags("--lr=0.25", "--config", str(file), "--metrics.tensorboard")
    assert config.train.lr == 0.25
    assert config.train.clip_grad == 2.0
    assert config.train.adam_beta1 == 0.9
    assert config.run.metrics.tensorboard


def test_resolved_toml_is_read_back_unchanged(tmp_path: Path) -> None:
    config = from_flags(
        "--run-name",
        'quo"ted \\ näme',
        "--lr",
        "1e-5",
        "--sglang-chunked-prefill-size",
        "64",
        "--sglang-enable-metrics",
        "--router-policy=manual",
        "--megatron-attention-dropout",
        "0.0",
    )
    again = load_resolved(write(tmp_path / "config.resolved.toml", config.to_toml()))
    assert again == config
    assert again.sglang == {"chunked_prefill_size": 64, "enable_metrics": True}
    assert again.megatron == {"attention_dropout": 0.0}


def test_configuration_is_frozen() -> None:
    config = resolve()
    for target in (config, config.run):
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, next(iter(type(target).model_fields)), None)


@pytest.mark.parametrize(
    ("flags", "field", "reason", "fix"),
    [
        (["--temperatur", "1"], "command line", "no such flag", "--temperature"),
        (
            ["--learning-rate", "1e-5"],
            "command line",
            "no such flag",
            "did you mean --lr?",
        ),
        (
            ["--learning_rate=1e-5"],
            "command line",
            "no such flag",
            "did you mean --lr?",
        ),
        (
            ["--learnin-rate", "1e-5"],
            "command line",
            "no such flag",
            "did you mean --lr?",
        ),
        (
            ["--batch-size", "8"],
            "command line",
            "no such flag",
            "did you mean --rollout-batch-size?",
        ),
        (
            ["--epochs", "3"],
            "command line",
            "no such flag",
            "did you mean --num-steps or --data.epochs?",
        ),
        (
            ["--epochs", "3", "--data-path", "d"],
            "command line",
            "no such flag",
            "mean --data.epochs?",
        ),
        (
            ["--max-tokens", "64"],
            "command line",
            "no such flag",
            "did you mean --max-new-tokens?",
        ),
        (
            ["--temp", "1"],
            "command line",
            "no such flag",
            "did you mean --temperature?",
        ),
        (
            ["--model", "x"],
            "command line",
            "no such flag",
            "did you mean --model-path?",
        ),
        (
            ["--dataset", "x"],
            "command line",
            "no such flag",
            "did you mean --task-file?",
        ),
        (
            ["--model_path", "x"],
            "command line",
            "no such flag",
            "did you mean --model-path?",
        ),
        (
            ["--ttl-of-a-session", "9"],
            "command line",
            "no such flag",
            "--session.ttl-s",
        ),
        (["--xyzzy", "9"], "command line", "no such flag", "see --help"),
        (
            ["--no-tensorbord"],
            "command line",
            "no such flag",
            "--no-metrics.tensorboard",
        ),
        (["--no-lr"], "command line", "no such flag", ""),
        (["--kl-coef", "1"], "command line", "no such flag", "write --kl.coefficient"),
        (["--critic-lr", "1"], "command line", "no such flag", "--critic.lr"),
        (["stray"], "command line", "no flag takes this", ""),
        (["--lr"], "--lr", "missing", "--lr VALUE"),
        (["--lr", "--seed", "1"], "--lr", "missing", "--lr VALUE"),
        (
            ["--metrics.tensorboard=yes"],
            "--metrics.tensorboard",
            "takes no value",
            "--no-name",
        ),
        (["--lr", "fast"], "train.lr", "command line", "learning rate"),
        (["--lr", "nan"], "train.lr", "greater than 0", "learning rate"),
        (
            ["--temperature", "0"],
            "rollout.temperature",
            "greater than 0",
            "temperature",
        ),
        (
            ["--train-dtype", "fp16"],
            "train.train_dtype",
            "'bfloat16' or 'float32'",
            "float32",
        ),
        (["--num-steps", "1.5"], "run.num_steps", "integer", "batches"),
        (["--num-steps", "2147483648"], "run.num_steps", "2^31", "smaller"),
        (
            ["--algorithm-preset", "grop"],
            "algorithm.algorithm_preset",
            "'grpo'",
            "by name",
        ),
        (["--config", "/no/such.toml"], "--config", "neither such a file", "readable"),
        (
            ["--data-parallel-size", "33"],
            "train.data_parallel_size",
            "33 copies",
            "--data-parallel",
        ),
        (
            ["--num-mini-batches", "5"],
            "algorithm.num_mini_batches",
            "whole groups",
            "--num-mini-batches",
        ),
        (
            ["--n-samples-per-prompt", "1", "--advantage", "reinforce"],
            "buffer.group_filter",
            "a group of one",
            "--group-filter none",
        ),
        (
            ["--advantage", "pass_at_k", "--pass-at-k", "8"],
            "algorithm.pass_at_k",
            "below",
            "--pass-at-k",
        ),
        (
            ["--critic.lr", "1e-4", "--advantage", "rloo"],
            "algorithm.advantage",
            "does not read the table [critic]",
            "--advantage or [critic]",
        ),
        (
            ["--advantage", "gae", "--critic.data-parallel-size", "33"],
            "critic.data_parallel_size",
            "33 copies of the critic",
            "lower --critic.data",
        ),
        (
            [
                "--advantage",
                "gae",
                "--critic.targets",
                "vtrace",
                "--correction",
                "truncated",
            ],
            "algorithm.correction",
            "old/rollout already",
            "--correction none",
        ),
        (
            [
                "--advantage",
                "gae",
                "--critic.targets",
                "vtrace",
                "--correction",
                "none",
                "--old-logprobs",
                "engine",
            ],
            "critic.targets",
            "--old-logprobs engine",
            "recompute",
        ),
        (
            ["--advantage", "gae", "--critic.vtrace-c-cap", "2"],
            "critic.vtrace_c_cap",
            "not vtrace",
            "--critic.targets vtrace",
        ),
        (
            ["--advantage", "gae", "--critic.warmup-steps", "4", "--num-steps", "4"],
            "critic.warmup_steps",
            "never learn",
            "--num-steps",
        ),
        (
            ["--discount", "0.9"],
            "algorithm.discount",
            "added up",
            "--turn-rewards.use add",
        ),
        (
            ["--reward-columns", "progress"],
            "algorithm.reward_columns",
            "no rewards of tokens",
            "gae",
        ),
        (
            ["--overlong.buffer", "15", "--max-new-tokens", "14"],
            "overlong.buffer",
            "14 tokens",
            "--overlong.length",
        ),
        (
            [
                "--advantage",
                "gae",
                "--reward-columns",
                "progress",
                "--session.extra-columns",
                "progress:rollout",
            ],
            "algorithm.reward_columns",
            "of tokens or turns",
            "--session.extra-columns progress:token",
        ),
        (
            ["--overlong.length", "99"],
            "overlong.buffer",
            "required",
            "give overlong.buffer too",
        ),
        (
            ["--n-samples-per-prompt", "1"],
            "rollout.n_samples_per_prompt",
            "compares",
            "2 or more",
        ),
        (
            ["--eval.interval", "5"],
            "eval.interval",
            "no held-out",
            "--eval.tasks",
        ),
        (
            ["--eval.sets", "a=m:f", "--eval.task-file", "x.jsonl"],
            "eval.task_file",
            "would be ignored",
            "NAME=x.jsonl",
        ),
        (
            ["--eval.samples-per-task", "64"],
            "eval.samples_per_task",
            "32 rollouts may",
            "--rollout-concurrency",
        ),
        (
            ["--eval.modes", "sampled,beam"],
            "eval.modes",
            "'greedy'",
            "eval.modes",
        ),
        (["--eval.modes="], "eval.modes", "at least 1", "eval.modes"),
        (
            ["--max-new-tokens", "900", "--engine.max-total-tokens", "900"],
            "rollout.max_new_tokens",
            "KV cache",
            "--engine.max",
        ),
        (
            ["--over-sampling-groups", "2"],
            "buffer.over_sampling_groups",
            "one version old",
            "--max-staleness",
        ),
        (
            ["--when-stale", "mask"],
            "buffer.when_stale",
            "as new as the weights",
            "--max-staleness",
        ),
        (
            ["--admission", "ready"],
            "buffer.admission",
            "no group is sampled before",
            "--max-staleness",
        ),
        (
            ["--max-staleness", "2", "--when-stale", "wait", "--admission", "ready"],
            "buffer.admission",
            "wait for a batch too long",
            "--when-stale",
        ),
        (
            [
                "--max-staleness",
                "2",
                "--when-stale",
                "wait",
                "--over-sampling-groups",
                "1",
            ],
            "buffer.over_sampling_groups",
            "wait for a batch too long",
            "--when-stale",
        ),
        (
            ["--optimizer-cpu-offload", "--no-use-distributed-optimizer"],
            "train.optimizer_cpu_offload",
            "only the distributed optimizer",
            "--no-use-distributed-optimizer",
        ),
        (["--colocate", "--debug-rollout-only"], "run.colocate", "not both", "leave"),
        (
            ["--colocate", "--debug-train-only", "--load-rollout-data", "x"],
            "run.colocate",
            "not both",
            "leave",
        ),
        (
            [
                "--colocate",
                "--external-engines",
                "http://10.0.0.5:30000",
                "--weights.transport",
                "disk",
            ],
            "engine.external_engines",
            "give no memory back",
            "--colocate",
        ),
        (
            ["--colocate", "--advantage", "gae", "--critic.data-parallel-size", "1"],
            "critic.data_parallel_size",
            "gives no memory back",
            "--colocate",
        ),
        (
            ["--colocate", "--weights.update", "rolling"],
            "weights.update",
            "all engines",
            "leave",
        ),
        (
            ["--colocate", "--weights.inflight", "in_place"],
            "weights.inflight",
            "cannot keep",
            "retract or drain",
        ),
        (
            ["--colocate", "--gateway.constrained", "masked"],
            "gateway.constrained",
            "grammar",
            "--gateway.constrained free",
        ),
        (
            ["--rollout-concurrency", "2000"],
            "rollout.rollout_concurrency",
            "admits 1024",
            "--session.max-open",
        ),
        (
            ["--rollout-concurrency", "many"],
            "rollout.rollout_concurrency",
            "valid integer",
            "auto",
        ),
        (
            ["--rollout-concurrency", "auto", "--session.max-open", "500"],
            "rollout.rollout_concurrency",
            "admits 500",
            "raise --session.max-open to 1024",
        ),
        (["--gate.max-hold-s", "0"], "gate.max_hold_s", "greater than 0", "seconds"),
        (["--gate.policy="], "gate.policy", "at least 1", "gate.policy"),
        (
            ["--workers.count", "64"],
            "workers.count",
            "at a time",
            "--rollout-conc",
        ),
        (["--gateway.port", "70000"], "gateway.port", "65535", "free"),
        (
            [
                "--engine.seeded-sampling",
                "--sglang-attention-backend",
                "flex_attention",
            ],
            "sglang.attention_backend",
            "by seed",
            "torch_native",
        ),
        (
            ["--sglang-sampling-backend", "flashinfer", "--engine.seeded-sampling"],
            "sglang.sampling_backend",
            "by seed",
            "--no-engine.seeded-sampling",
        ),
        (
            [
                "--gateway.constrained",
                "masked",
                "--sglang-grammar-backend",
                "llguidance",
            ],
            "sglang.grammar_backend",
            "masked",
            "--gateway.constrained free",
        ),
        (
            [
                "--gateway.constrained",
                "masked",
                "--sglang-constrained-json-disable-any-whitespace",
            ],
            "sglang.constrained_json_disable_any_whitespace",
            "masked",
            "--gateway.constrained free",
        ),
        (
            ["--sglang-api-key", "s3cret"],
            "sglang.api_key",
            "keys",
            "leave --sglang-api-key out",
        ),
    ],
)
def test_bad_flags_name_field_reason_and_fix(
    flags: list[str], field: str, reason: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_flags(*flags)
    assert caught.value.field == field
    assert reason in caught.value.reason
    assert fix in caught.value.fix
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "field", "fix"),
    [
        ("[rolout]\n", "rolout", "rollout"),
        ("[rollout]\ntemprature = 1\n", "rollout.temprature", "temperature"),
        (
            "[train]\ntemperature = 1.0\n",
            "train.temperature",
            "move it to table [rollout]",
        ),
        ("[train]\nlearning_rate = 1e-5\n", "train.learning_rate", "did you mean lr?"),
        (
            "[train]\nbatch_size = 8\n",
            "train.batch_size",
            "rollout_batch_size, in table [rollout]",
        ),
        (
            "[rollout]\nmax_tokens = 8\n",
            "rollout.max_tokens",
            "did you mean max_new_tokens?",
        ),
        ("learning_rate = 1e-5\n", "learning_rate", "write it as lr, in table [train]"),
        ("train = 3\n", "train", "[train]"),
        ("[train\n", "--config", "readable TOML"),
        ("algorithm_preset = 3\n", "algorithm_preset", "move it to table [algorithm]"),
        ("[sglang]\nx = [1, 2]\n", "sglang", "a string, a number or a boolean"),
    ],
)
def test_bad_toml_names_its_line(
    text: str, field: str, fix: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "bad.toml", text)
    with pytest.raises(ConfigError) as caught:
        from_flags("--config", str(file))
    assert caught.value.field.startswith(field)
    assert fix in caught.value.fix
    assert (
        str(file) in caught.value.field + str(caught.value.value) + caught.value.reason
    )


def test_user_code_is_checked_by_path() -> None:
    with pytest.raises(PluginError, match="calculater"):
        make_checks(
            from_flags("--rollout-function-path", "rollout_fns.calculater:rollout"),
            USER_CODE,
        )
    with pytest.raises(ConfigError, match="there are no tasks"):
        make_checks(
            from_flags("--rollout-function-path", "rollout_fns.calculator:rollout"),
            USER_CODE,
        )


def test_a_run_without_a_rollout_function_is_refused_where_rollouts_are_run_here() -> (
    None
):
    with pytest.raises(ConfigError) as caught:
        make_checks(resolve(), USER_CODE)
    error = caught.value
    assert error.field == "rollout.rollout_function_path"
    assert error.value == ""
    assert "--rollout-function-path my_agent:rollout" in error.fix
    assert "--config quickstart" in error.fix

    outside = from_flags("--external-environments")
    assert "your environments" in str(run_check("rollout function", outside))
    with pytest.raises(
        ConfigError, match="are always run by our own workers"
    ) as caught:
        make_checks(
            from_flags("--external-environments", "--eval.tasks", "4"),
            ("rollout function",),
        )
    assert "--no-eval.tasks" in caught.value.fix
    assert held_out_only(
        from_flags("--external-environments", "--task-file", "t").rollout
    ).runs_rollouts


@pytest.mark.parametrize(
    ("flag", "value", "fix"),
    [
        ("--sglang-chunked-prefil-size", "64", "chunked-prefill-size"),
        ("--router-polcy", "manual", "policy"),
        ("--megatron-recompute-granularit", "full", "recompute-granularity"),
    ],
)
def test_passed_through_options_are_checked_against_their_package(
    flag: str, value: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_checks(
            from_flags(flag, value),
            ("sglang options", "router options", "megatron options"),
        )
    assert fix in caught.value.fix.replace("_", "-")


def test_a_field_of_ours_wins_over_a_package_prefix() -> None:
    assert (
        from_flags("--engine.router-start-timeout-s", "7").engine.router_start_timeout_s
        == 7
    )


def test_passed_through_values_keep_their_written_type() -> None:
    arguments = [
        "--sglang-a",
        "1",
        "--sglang-b=-0.5",
        "--sglang-c",
        "--sglang-d",
        "tRue",
        "--router-e",
        "x-y",
        "--router-f",
        "007",
    ]
    (source,) = parse_flags(arguments)
    assert source.tables == {
        "sglang": {
            "a": 1,
            "b": -0.5,
            "c": True,
            "d": True,
        },
        "router": {"e": "x-y", "f": "007"},
    }


def test_configuration_sections_are_documented() -> None:
    assert set(SECTIONS) | set(UPSTREAM) == set(Config.model_fields)
    assert resolve(Source(name="test", tables={"run": {"seed": 3}})).run.seed == 3


def test_gate_has_defaults_that_go_together() -> None:
    config = from_flags("--gate")
    assert config.gateway.gate is not None
    assert config.gateway.gate.policy == "program"


@pytest.mark.parametrize(
    ("flags", "by_priority"),
    [
        ([], False),
        (["--gate"], True),
        (["--sglang-enable-priority-scheduling"], False),
        (["--gate", "--sglang-schedule-policy", "lof"], True),
        (["--gate", "--sglang-schedule-policy", "lpm"], False),
        (["--gate", "--sglang-enable-metrics"], False),
        (["--gate", "--sglang-enable-metrics", "false"], True),
        (["--gate", "--sglang-schedule-low-priority-values-first"], False),
    ],
)
def test_engines_schedule_by_priority_with_a_gate(
    flags: list[str], by_priority: bool
) -> None:
    assert from_flags(*flags).uses_priority_scheduling is by_priority


def test_seeded_sampling_needs_its_attention_backends() -> None:
    flags = [
        "--sglang-attention-backend",
        "fa3",
        "--sglang-sampling-backend",
        "pytorch",
    ]
    assert from_flags("--engine.seeded-sampling", *flags).engine.seeded_sampling
    assert not from_flags(
        "--sglang-attention-backend", "flex_attention"
    ).engine.seeded_sampling


DETERMINISTIC = (
    "--deterministic --engine.seeded-sampling --engine.dtype float32 --max-staleness 0 --rollout-concurrency 1 "
    "--workers.count 1 --sglang-max-running-requests 1 --sglang-disable-radix-cache"
).split()


def test_a_deterministic_run_samples_one_request_at_a_time() -> None:
    assert from_flags(*DETERMINISTIC).train.deterministic
    with pytest.raises(ConfigError) as error:
        from_flags(
            "--deterministic",
            "--engine.seeded-sampling",
            "--max-staleness",
            "2",
            "--num-engines",
            "2",
        )
    for flag in (
        "--max-staleness 0",
        "--num-engines 1",
        "--rollout-concurrency 1",
        "--engine.dtype float32",
    ):
        assert flag in error.value.fix
    assert "--engine.seeded-sampling" not in error.value.fix
    with pytest.raises(ConfigError, match="add --no-external-environments; or leave"):
        from_flags(*DETERMINISTIC, "--external-environments")
    trainer_alone = ["--debug-train-only", "--load-rollout-data", "folder"]
    assert from_flags("--deterministic", *trainer_alone).train.deterministic


def test_every_gateway_setting_reaches_the_gateway(tmp_path: Path) -> None:
    # slow to import, and only needed here
    from invrl.run.processes.serving import _gateway_settings

    flags = "--gateway.workers 3 --session.max-turns 7 --late.deadline-s 5 --late.expired accept".split()
    flags += "--no-session.train-auxiliary-roots --gateway.match-level exact".split()
    flags += "--no-keep-thinking --tool-call-parser none".split()
    config = from_flags("--model-path", str(tmp_path), *flags)
    limits = EngineLimits(vocab_size=512, context_length=64)
    fleet = SimpleNamespace(
        limits=limits,
        router=SimpleNamespace(url="http://127.0.0.1:1", api_key="k"),
        eval_router=None,
    )

    def gateway_settings(longest_row: int | None) -> GatewaySettings:
        return _gateway_settings(
            config,
            RunFolder(path=tmp_path),
            fleet,  # type: ignore[arg-type]
            longest_row=longest_row,
            free_port=20_001,
            env_key="",
        )

    settings = gateway_settings(None)
    assert settings.workers == 3
    assert settings.session.max_turns == 7
    assert settings.late == LateConfig(deadline_s=5.0, expired="accept")
    taken = settings.model_dump(include=set(GatewayConfig.model_fields))
    assert taken == config.gateway.model_dump() | {"port": settings.port}
    assert settings.port == 20_001
    assert settings.context_length == 64
    assert gateway_settings(100).context_length == 64
    assert gateway_settings(33).context_length == 33


# ----------------------------------------------------------------- what cannot act


def first_words(config: Config) -> list[str]:
    return [
        " ".join(sentence.split()[:2]) for sentence in config.algorithm.without_effect()
    ]


@pytest.mark.parametrize(
    ("flags", "inert"),
    [
        ([], ["the clip"]),
        (["--num-mini-batches", "2"], []),
        (["--old-logprobs", "engine"], ["the truncated"]),
        (["--old-logprobs", "engine", "--correction", "none"], []),
        (["--old-logprobs", "engine", "--num-mini-batches", "4"], ["the truncated"]),
        (["--algorithm-preset", "grpo"], ["the clip"]),
        (["--algorithm-preset", "dapo"], []),
        (["--algorithm-preset", "dapo", "--num-mini-batches", "1"], ["the clip"]),
    ],
)
def test_settings_without_effect_are_listed(flags: list[str], inert: list[str]) -> None:
    assert first_words(from_flags(*flags)) == inert


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--algorithm-preset", "dapo"],
        ["--debug-rollout-only"],
    ],
)
def test_run_prints_settings_without_effect_at_its_start(
    flags: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = from_flags(
        *flags,
        "--run-root",
        str(tmp_path),
        "--run-name",
        "a",
        "--no-metrics.tensorboard",
    )
    monkeypatch.setattr(
        "invrl.run.incarnations.incarnation.interrupts.run", lambda work: work.close()
    )
    run_incarnation(config, make_run_folder(config))
    notes = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("note: ")
    ]
    assert len(notes) == (1 if not flags else 0)
    assert all("the clip" in line and "--num-mini-batches" in line for line in notes)
