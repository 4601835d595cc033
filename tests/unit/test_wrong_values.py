"""A wrong value of a setting is answered with the nearest one, or with the setting that
it belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from invrl.cli import main as cli
from invrl.cli.flags import parse_flags
from invrl.errors import ConfigError
from invrl.rollout.config import RolloutConfig
from invrl.rollout.tasks.tasks import check_tasks
from invrl.run.settings.config import resolve
from invrl.user_code.near_path import path_fix


def fix(*flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*parse_flags(flags))
    return caught.value.fix


@pytest.mark.parametrize(
    ("flags", "near"),
    [
        (["--algorithm-preset", "grop"], "did you mean grpo?"),
        (["--algorithm-preset", "GRPO"], "did you mean grpo?"),
        (["--algorithm-preset", "dr-grpo"], "did you mean dr_grpo?"),
        (["--algorithm-preset", "reinforce++"], "did you mean reinforce_pp?"),
        (["--engine.dtype", "fp32"], "did you mean float32?"),
        (["--train-dtype", "bf16"], "did you mean bfloat16?"),
        (["--eval.modes", "sampled,greddy"], "did you mean greedy?"),
        (["--late.deadline-s", "5", "--late.expired", "acept"], "did you mean accept?"),
        (["--objective", "dopo"], "did you mean dpo?"),
        (["--objective", "nothing-like-it"], "module:name"),
    ],
)
def test_a_misspelt_value_gets_the_nearest_one(flags: list[str], near: str) -> None:
    assert near in fix(*flags)


@pytest.mark.parametrize(
    ("flags", "owner"),
    [
        (
            ["--algorithm-preset", "dpo"],
            "dpo is an objective: write --objective dpo --data-path FILE.jsonl",
        ),
        (
            ["--algorithm-preset", "sft"],
            "write --objective sft --data-path FILE.jsonl, with conversations",
        ),
        (["--algorithm-preset", "distillation"], "write --objective distillation"),
        (["--objective", "gspo"], "write --algorithm-preset gspo"),
        (["--objective", "grpo"], "write --advantage grpo or --algorithm-preset grpo"),
        (["--policy-loss", "dapo"], "write --algorithm-preset dapo"),
        (["--advantage", "sft"], "write --objective sft"),
        (["--aggregation", "k3"], "write --kl.estimator k3"),
    ],
)
def test_a_value_of_another_setting_names_that_one(
    flags: list[str], owner: str
) -> None:
    assert owner in fix(*flags)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("quickstrat", "quickstart"),
        ("my_tsk.toml", "my_task.toml"),
        ("nothing-like-it", "or a preset: "),
    ],
)
def test_a_misspelt_config_gets_the_nearest_file_or_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, near: str
) -> None:
    (tmp_path / "my_task.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert near in fix("--config", name)


def test_a_path_is_compared_where_it_goes_wrong(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.jsonl").write_text("")
    assert f"did you mean {tmp_path}/data/tasks.jsonl?" in path_fix(
        tmp_path / "data" / "taks.jsonl", ""
    )
    assert f"did you mean {tmp_path}/data?" in path_fix(
        tmp_path / "dta" / "tasks.jsonl", ""
    )
    assert path_fix(tmp_path / "data" / "tasks.jsonl", "read it") == "read it"
    assert path_fix(tmp_path / "other" / "x", "make it") == "make it"


def test_misspelt_files_models_templates_and_runs_get_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        check_tasks(RolloutConfig(task_file="taks.jsonl"), 0)
    assert "did you mean tasks.jsonl?" in caught.value.fix
    (tmp_path / "models" / "smollm").mkdir(parents=True)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    for arguments, near in [
        (["serve", "--model-path", "./models/smolm"], "did you mean models/smollm?"),
        (["samples", "runs/frist"], "runs/first?"),
        (["view", "runs/frist"], "runs/first?"),
    ]:
        assert cli.main(arguments) == 2
        assert near in capsys.readouterr().err


@pytest.mark.parametrize("command", ["samples", "ledger", "export", "report"])
def test_a_flag_before_the_run_is_told_to_come_after_it(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--step", "1"]) == 2
    assert "write RUN before it" in capsys.readouterr().err


def test_a_misspelt_module_gets_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from invrl.user_code.plugins import load_rollout_function

    (tmp_path / "my_agent_of_values.py").write_text(
        "async def rollout(task, endpoint): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'my_agent_of_values:rollout'"):
        load_rollout_function("my_agnt_of_values:rollout")
