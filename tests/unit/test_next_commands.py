"""What a run prints when its command ends: commands whose paths and flags are real."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import pytest
from recorded_run import record_run

from invrl.cli import main as cli
from invrl.cli import next_commands
from invrl.cli.flags import parse_flags
from invrl.cli.next_commands import describe_next
from invrl.run.processes import supervisor
from invrl.run.settings.config import Config, Source, resolve
from invrl.run.settings.folder import make_run_folder
from invrl.run.settings.resolved_config import load_resolved
from invrl.store.run_folder import RunFolder
from invrl.types.reasons import FailureReason
from invrl.types.sessions import Purpose

AGENT = "rollout_fns.calculator:rollout"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    run = {"run_root": str(tmp_path / "my runs"), "run_name": "capitals"}
    return resolve(
        Source(
            name="test",
            tables={"run": run, "rollout": {"rollout_function_path": AGENT}},
        )
    )


@pytest.fixture
def folder(config: Config) -> RunFolder:
    return make_run_folder(config)


def save(folder: RunFolder, step: int) -> Path:
    checkpoint = folder.checkpoints_path / f"step-{step:06d}"
    (checkpoint / "hugging_face").mkdir(parents=True)
    (checkpoint / "megatron").mkdir()
    return checkpoint


def by_name(text: str) -> dict[str, list[str]]:
    """Words of each command without its program, by the command's name."""
    first, *lines = text.splitlines()
    assert first == f"next (in {Path.cwd()}):", (
        "tasks and code may be given relative to it"
    )
    words = [shlex.split(line, comments=True) for line in lines]
    assert not any(
        "invrl" not in w[0] and "tensorboard" not in w[0] and "python" not in w[0]
        for w in words
    )
    rest = [w[3:] if w[1] == "-m" else w[1:] for w in words]
    return {
        "tensorboard" if w[0] == "--logdir" else w[0]: w
        if w[0] == "--logdir"
        else w[1:]
        for w in rest
    }


def test_end_of_a_run_prints_the_next_commands(
    config: Config, folder: RunFolder
) -> None:
    save(folder, 4)
    newest = save(folder, 12)
    folder.store_path.write_bytes(b"")
    folder.tensorboard_path.mkdir()
    folder.metrics_path.touch()
    commands = by_name(describe_next(config, folder, finished=True))
    assert list(commands) == ["serve", "eval", "samples", "view", "tensorboard"]
    assert set(commands) - {"tensorboard"} <= set(cli.COMMANDS)
    assert commands["serve"] == ["--model-path", str(newest)]
    assert commands["samples"] == [str(folder.path)]
    assert commands["view"] == [str(folder.path)]
    assert commands["tensorboard"] == ["--logdir", str(folder.tensorboard_path)]
    served = resolve(*parse_flags(commands["serve"], command="serve"))
    assert served.model.name == "capitals"
    measured = resolve(*parse_flags(commands["eval"], command="eval"))
    assert measured.rollout.rollout_function_path == AGENT
    assert measured.run.run_name == "capitals-eval", (
        "a folder of its own: the run's holds another configuration"
    )
    assert measured.model.folder == newest / "hugging_face"


def test_a_run_of_an_adapter_prints_the_command_that_merges_it(
    config: Config, folder: RunFolder
) -> None:
    adapter = save(folder, 4) / "hugging_face" / "adapter_config.json"
    adapter.write_text("{}")
    commands = by_name(describe_next(config, folder, finished=True))
    assert commands == {"export": [str(folder.path)]}


def test_interrupted_run_prints_the_resume_command(
    config: Config, folder: RunFolder
) -> None:
    text = describe_next(config, folder, finished=False)
    assert list(by_name(text)) == ["resume"], "nothing else is there"
    assert "there is no checkpoint yet" in text
    save(folder, 4)
    (folder.checkpoints_path / "model-000006").mkdir()  # what an interrupt saves
    text = describe_next(config, folder, finished=False)
    assert "continue from step 4" in text
    commands = by_name(text)
    assert commands["resume"] == [str(folder.path)]
    assert commands["serve"][1].endswith("model-000006")
    served = resolve(*parse_flags(commands["serve"], command="serve"))
    assert served.model.name == "capitals"


def test_a_run_without_a_whole_checkpoint_cannot_be_resumed(
    config: Config, folder: RunFolder
) -> None:
    older = save(folder, 2)
    newer = save(folder, 4)
    folder.store_path.write_bytes(b"")
    newer.rename(newer.with_name("step-000004.damaged"))
    assert "continue from step 2" in describe_next(config, folder, finished=False)
    older.rename(older.with_name("step-000002.damaged"))
    assert list(by_name(describe_next(config, folder, finished=False))) == ["samples"]


@pytest.mark.parametrize(
    ("purpose", "flags"),
    [
        ("train", ["--failed"]),
        ("eval", ["--failed", "--eval"]),
    ],
)
def test_rollouts_that_failed_have_a_command(
    tmp_path: Path, purpose: Purpose, flags: list[str]
) -> None:
    run = record_run(tmp_path)
    config = load_resolved(run.folder.config_path)
    run.add("a", "x", 1.0, purpose=purpose)
    assert "--failed" not in describe_next(config, run.folder, finished=True)
    run.add("b", "x", 0.0, purpose=purpose, failure=FailureReason.EXCEPTION)
    text = describe_next(config, run.folder, finished=True)
    (line,) = [line for line in text.splitlines() if "--failed" in line]
    assert shlex.split(line, comments=True)[-1 - len(flags) :] == [
        str(run.folder.path),
        *flags,
    ]
    assert cli.main(["samples", str(run.folder.path), *flags]) == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "samples"),
        (1, "samples"),
        (2, ""),
    ],
)
def test_eval_prints_them_too(
    config: Config,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    said: str,
) -> None:
    folder.store_path.write_bytes(b"")
    module = "invrl.cli.commands.evaluate"
    monkeypatch.setattr(
        f"{module}.checked_configuration", lambda arguments, command: config
    )
    monkeypatch.setattr(
        f"{module}.hold_run_folder",
        lambda config, command: contextlib.nullcontext(folder),
    )
    monkeypatch.setattr(f"{module}.log_to_folder", lambda *_, **__: None)
    monkeypatch.setattr(
        supervisor, "supervise_once", lambda config, folder, inner: code
    )
    assert cli.main(["eval"]) == code
    out = capsys.readouterr().out
    assert ("next (in " in out) == bool(said)
    assert said in out
    assert "resume" not in out, "an evaluation is not resumed"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "samples"),
        (130, "resume"),
        (1, "resume"),
        (2, ""),
    ],
)
def test_train_prints_next_commands_after_every_kind_of_end(
    config: Config,
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
    said: str,
) -> None:
    folder.store_path.write_bytes(b"")
    monkeypatch.setattr(
        "invrl.cli.commands.train.checked_configuration",
        lambda arguments, command: config,
    )
    monkeypatch.setattr("invrl.cli.commands.train.log_to_folder", lambda *_, **__: None)
    monkeypatch.setattr(supervisor, "supervise", lambda config, folder: code)
    assert cli.main(["train"]) == code
    out = capsys.readouterr().out
    assert ("next (in " in out) == bool(said)
    assert said in out


def test_printed_program_name_is_one_that_a_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "venv" / "bin"
    beside.mkdir(parents=True)
    for name in ("python", "invrl"):
        (beside / name).write_text("#!/bin/sh\n")
        (beside / name).chmod(0o755)
    monkeypatch.setattr(next_commands.sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next_commands._program("invrl") == (str(beside / "invrl"),)
    monkeypatch.setenv("PATH", str(beside))
    assert next_commands._program("invrl") == ("invrl",)
