"""The command line as a person meets it: help, one-block errors, exit codes."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import invrl
from invrl.cli import flags
from invrl.cli import main as cli
from invrl.cli.command_settings import settings_for_command
from invrl.errors import ConfigError, ServerError
from invrl.run.processes import supervisor
from invrl.run.processes.driver_commands import INCARNATION_COMMAND
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.resolved_config import load_resolved
from invrl.run.settings.run_config import ModelConfig
from invrl.store.run_folder import RunFolder

Work = Callable[[Config, RunFolder], None]
TRAIN_ONLY = {"train", "algorithm", "buffer", "weights"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Stands in for the module that starts a run's processes. No handler stays."""
    stand_in = types.ModuleType("stand_in")
    monkeypatch.setitem(sys.modules, "invrl.run.incarnations.incarnation", stand_in)
    monkeypatch.setattr("invrl.host.processes.interrupts.catch", lambda: None)
    handlers = logging.getLogger().handlers[:]
    yield stand_in
    logging.getLogger().handlers[:] = handlers


def train(model: Path, tmp_path: Path, *more: str) -> int:
    return cli.main(
        [
            "train",
            "--model-path",
            str(model),
            "--run-root",
            str(tmp_path),
            "--run-name",
            "r",
            "--task-source-path",
            "rollout_fns.calculator:task_source",
            "--rollout-function-path",
            "rollout_fns.calculator:rollout",
            *more,
        ]
    )


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in out
        assert command.summary
        assert command.summary in out
    assert cli.main([]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
    ],
)
def test_closed_output_pipe_prints_no_error(arguments: list[str]) -> None:
    """As in `invrl --help | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "invrl.cli", *arguments]
    process = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert process.returncode == 1
    assert process.stderr == ""


def test_version_option_prints_the_package_version(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"invrl {importlib.metadata.version('invrl')}\n"
    assert importlib.metadata.version("invrl") == invrl.__version__


def test_a_local_ray_is_the_run_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For Ray, the address `local` means a new Ray, without what a run's own has: its
    token, its folder, its priority."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    cli.main(["--version"])
    assert "RAY_ADDRESS" not in os.environ
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    cli.main(["--version"])
    assert os.environ["RAY_ADDRESS"] == "127.0.0.1:6379"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["view", "--help"], ["train", "--help"]]
)
def test_help_and_version_load_no_command(arguments: list[str]) -> None:
    """They answer at once: pydantic alone would take longer than all the rest. Only the
    help of settings needs it."""
    code = """
import sys
from invrl.cli.main import main
main(sys.argv[1:])
heavy = {"psutil", "ray", "torch", "transformers", "tokenizers", "fastapi", "invrl.cli.commands"}
if "train" not in sys.argv:
    heavy |= {"pydantic", "numpy", "invrl.cli.flags"}
sys.exit(", ".join(heavy & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stderr.strip() == "", process.stderr


def test_help_of_train_begins_with_the_settings_of_a_first_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "--help"]) == 0
    flags_in_order = re.findall(
        r"^  (--[a-z0-9.-]+)", capsys.readouterr().out, re.MULTILINE
    )
    assert flags_in_order[:11] == [
        "--config",
        "--model-path",
        "--rollout-function-path",
        "--task-file",
        "--reward-function-path",
        "--num-steps",
        "--rollout-batch-size",
        "--n-samples-per-prompt",
        "--max-new-tokens",
        "--lr",
        "--run-name",
    ]
    assert len(flags_in_order) == len(set(flags_in_order)), "each setting has one entry"


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example" in out or "usage" in out
    shown = set(re.findall(r"--[a-z0-9.-]+", out.partition("sources:")[2]))
    own = {
        setting.flag
        for setting in flags.SETTING_FLAGS
        if settings_for_command(name).uses(setting.table, setting.key)
    }
    settings = {setting.flag for setting in flags.SETTING_FLAGS}
    assert settings & shown == (own if cli.COMMANDS[name].takes_settings else set())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["trian"], "did you mean train?"),
        (["show-config", "--sed", "1"], "did you mean --seed?"),
        (["train"], "--model-path"),
        (["serve", "--model-path", "/no/such"], "no such folder"),
        (["prepare-model", "--out", "x"], "one of --gguf"),
        (
            ["prepare-model", "--gguf", "a", "--from-folder", "b", "--out", "x"],
            "one of --gguf",
        ),
        (["prepare-model", "--gguf", "a"], "--out FOLDER"),
        (["prepare-model", "--ggfu", "a"], "--gguf"),
        (["prepare-model", "--gguf", "/no/such", "--out", "/tmp/x"], "no such file"),
        (
            ["prepare-model", "--gguf", "a", "--out", "x", "--dtype", "int4"],
            "bfloat16 or float32",
        ),
        (["eval", "--model-path", "/no/such"], "no tasks"),
        (["serve", "--model-path", "/no/such", "--lr", "1e-5"], "invrl serve --help"),
        (
            ["serve", "--model-path", "/no/such", "--num-steps=3"],
            "it means nothing to `invrl serve`",
        ),
        (
            ["serve", "--model-path", "/no/such", "--megatron-fp16"],
            "it means nothing to `invrl serve`",
        ),
        (
            ["serve", "--model-path", "/no/such", "--no-session.train-auxiliary-roots"],
            "it means nothing",
        ),
        (
            ["eval", "--model-path", "/no/such", "--rollout-batch-size", "4"],
            "it means nothing to `invrl eval`",
        ),
        (
            ["eval", "--model-path", "/no/such", "--eval.engines", "1"],
            "it means nothing to `invrl eval`",
        ),
        (
            ["serve", "--model-path", "/no/such", "--eval.engines", "1"],
            "it means nothing to `invrl serve`",
        ),
        (
            ["eval", "--model-path", "/no/such", "--eval-taks", "4"],
            "did you mean --eval.tasks?",
        ),
        (["report"], "it is missing"),
        (["report", "/no/such"], "not a run folder"),
    ],
)
def test_bad_input_prints_one_block_and_exits_with_2(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert part in err
    assert "Traceback" not in err
    assert [line.split(":")[0].strip() for line in err.splitlines()] == [
        "invrl",
        "where",
        "value",
        "reason",
        "fix",
    ]


def test_show_config_prints_the_resolved_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show-config", "--lr", "0.125"]) == 0
    file = tmp_path / "c.toml"
    file.write_text(capsys.readouterr().out)
    assert load_resolved(file).train.lr == 0.125


def test_train_passes_a_checked_config_and_its_run_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Config, RunFolder]] = []
    monkeypatch.setattr(
        supervisor, "supervise", lambda config, folder: seen.append((config, folder))
    )
    assert train(model, tmp_path, "--num-steps", "3") == 0
    [(config, folder)] = seen
    assert config.run.num_steps == 3
    assert load_resolved(folder.config_path) == config


def test_failed_run_exits_with_1_and_names_its_log(
    model: Path,
    tmp_path: Path,
    cluster: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_incarnation(config: Config, folder: RunFolder) -> None:
        raise ServerError("engine-0 ended with code 3")

    def supervise(config: Config, folder: RunFolder) -> int:
        return cli.main([INCARNATION_COMMAND, str(folder.path)])  # in this process

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setattr("invrl.cli.run_process.prepare_ray", lambda: None)
    vars(cluster)["run_incarnation"] = run_incarnation
    assert train(model, tmp_path) == 1
    err = capsys.readouterr().err
    log = tmp_path / "r" / "logs" / "driver.log"
    assert "engine-0 ended with code 3" in err
    assert str(log) in err
    assert "Traceback" not in err
    assert "Traceback" in log.read_text()


def test_serve_and_eval_show_only_the_settings_that_they_use() -> None:
    for command in ("serve", "eval"):
        uses = settings_for_command(command).uses
        assert uses("model", "model_path")
        assert uses("run", "run_name")
        assert uses("gateway", "chat_template_path")
        assert uses("engine", "num_engines")
        assert not uses("run", "num_steps")
        assert not any(
            uses(leaf.table, leaf.key)
            for leaf in flags.SETTING_FLAGS
            if leaf.table in TRAIN_ONLY
        )
    assert settings_for_command("serve").uses("rollout", "temperature")
    assert not settings_for_command("serve").uses("rollout", "rollout_function_path")
    assert settings_for_command("eval").uses("rollout", "rollout_function_path")
    assert settings_for_command("eval").uses("eval", "samples_per_task")
    assert all(
        settings_for_command("train").uses(leaf.table, leaf.key)
        for leaf in flags.SETTING_FLAGS
    )


@pytest.mark.parametrize(
    ("command", "limits"),
    [
        ("serve", ["--session.max-open", "1", "--session.ttl-s", "1"]),
        ("eval", ["--rollout-timeout-s", "100000", "--session.ttl-s", "100000"]),
    ],
)
def test_settings_of_other_commands_do_not_contradict_a_limit(
    command: str, limits: list[str]
) -> None:
    with pytest.raises(ConfigError):
        resolve(*flags.parse_flags(limits))  # it does in training
    own = settings_for_command(command)
    config = resolve(*flags.parse_flags(limits, command=command), own.source())
    for table, values in own.neutral.items():
        assert not any(own.uses(table, key) for key in values)
    assert (
        resolve(Source(name="again", tables=tomllib.loads(config.to_toml()))) == config
    )


def test_checkpoint_is_served_under_the_name_of_its_run(tmp_path: Path) -> None:
    def name(path: Path) -> str:
        return ModelConfig(model_path=str(path)).name

    checkpoint = tmp_path / "runs" / "capitals" / "checkpoints" / "step-000012"
    (checkpoint / "hugging_face").mkdir(parents=True)
    assert name(checkpoint) == "step-000012", "not in a run's folder"
    (tmp_path / "runs" / "capitals" / "config.resolved.toml").write_text("")
    assert name(checkpoint) == "capitals"
    assert name(checkpoint / "hugging_face") == "capitals"
    assert name(tmp_path / "models" / "smollm2") == "smollm2"


def test_interrupt_exits_with_130(
    model: Path,
    tmp_path: Path,
    cluster: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve_model(config: Config, folder: RunFolder) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("invrl.cli.commands.serve.serve_model", serve_model)
    assert (
        cli.main(["serve", "--model-path", str(model), "--run-root", str(tmp_path)])
        == 130
    )


def test_train_refuses_bad_user_code_before_a_run_folder_exists(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train(
            model, tmp_path, "--rollout-function-path", "rollout_fns.calculator:rolout"
        )
        == 2
    )
    assert "rollout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_eval_takes_the_model_of_a_checkpoint_and_a_task_file(
    model: Path,
    tmp_path: Path,
    cluster: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Config] = []

    async def run_evaluation(config: Config, folder: RunFolder) -> None:
        seen.append(config)

    def supervise_once(config: Config, folder: RunFolder, inner: str) -> int:
        return cli.main([inner, str(folder.path)])  # in this process

    monkeypatch.setattr("invrl.cli.commands.evaluate.run_evaluation", run_evaluation)
    monkeypatch.setattr(supervisor, "supervise_once", supervise_once)
    monkeypatch.setattr("invrl.cli.run_process.prepare_ray", lambda: None)
    tasks = tmp_path / "tasks.jsonl"
    checkpoint = tmp_path / "step-000002"
    tasks.write_text('{"id": 1}\n')
    (checkpoint / "megatron").mkdir(parents=True)
    place = ["--task-file", str(tasks), "--run-root", str(tmp_path)]
    agent = ["--rollout-function-path", "rollout_fns.calculator:rollout"]
    flags = ["eval", f"--model-path={checkpoint}", *place, *agent]
    assert cli.main(flags) == 2
    assert "a checkpoint without a folder hugging_face" in capsys.readouterr().err
    (checkpoint / "hugging_face").symlink_to(model)
    assert cli.main(flags) == 0
    assert seen[0].model.folder == (checkpoint / "hugging_face")
    assert seen[0].rollout.task_file is None
    assert seen[0].rollout.eval.task_file == str(tasks)
    assert cli.main([*flags, "--eval.tasks", "2"]) == 2
    assert "has 1 tasks" in capsys.readouterr().err
