"""invrl as an installed package: presets by name, what is in the wheel, what a missing package is called."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.cli import installation
from invrl.cli import main as cli
from invrl.cli.flags import parse_flags
from invrl.cli.presets import preset_names
from invrl.gateway.rendering import model_folder
from invrl.run.config import load_resolved, resolve

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "launch" / "configs"


def test_a_preset_is_found_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.toml"))
    for name in preset_names():
        assert resolve(*parse_flags(["--config", name])) == load_resolved(CONFIGS / f"{name}.toml")
    (tmp_path / "quickstart").write_text("[run]\nnum_steps = 77\n")
    assert resolve(*parse_flags(["--config", "quickstart"])).run.num_steps == 77, "a file of that name wins"


def test_the_path_of_a_preset_that_is_not_here_is_answered_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show-config", "--config", "launch/configs/quickstart.toml"]) == 2
    assert "--config quickstart" in capsys.readouterr().err
    assert cli.main(["show-config", "--config", "no_such.toml"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_missing_package_is_told_before_the_template_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers puts it when it has to render and jinja2 is not installed."""

    def render(*_: object, **__: object) -> str:
        raise ImportError("apply_chat_template requires jinja2 to be installed")

    model = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(model_folder._JinjaTemplate, "__call__", render)
    cli.main(["doctor", "--model-path", str(model), "--run-root", str(tmp_path)])
    [line] = [line for line in capsys.readouterr().out.splitlines() if "chat template:" in line]
    assert "requires jinja2" in line
    assert "repair chat_template" not in line
    assert installation.install_command(gpu=False) in line

    folder = tmp_path / "site" / "invrl-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: invrl\nVersion: 0.1.0\nRequires-Dist: nobody-has-it\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    assert cli.main(["serve", "--model-path", str(model), "--run-root", str(tmp_path / "runs")]) == 2
    assert "nobody-has-it is missing" in capsys.readouterr().err


def test_the_command_that_installs_names_files_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = installation.install_command(gpu=False).split()[-1]
    assert os.access(script, os.X_OK)
    monkeypatch.setattr(
        installation, "_INSTALL_SCRIPT", tmp_path / "install.sh"
    )  # as in an installed package
    for gpu in (False, True):
        words = installation.install_command(gpu=gpu).split()
        files = [word for word in words if word.endswith(".txt")]
        assert len(files) == 2
        assert all(Path(file).is_file() for file in files)
        assert "install.sh" not in " ".join(words)


def test_the_wheel_holds_presets_requirements_templates_and_examples(tmp_path: Path) -> None:
    """Built by setuptools alone, of a copy: a build leaves folders beside the sources."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "invrl", "rollout_fns", "launch"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy / name)], check=True)
    build = "from setuptools import build_meta; import sys; build_meta.build_wheel(sys.argv[1])"  # PEP 517
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [wheel] = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"invrl/presets/{path.name}" for path in CONFIGS.glob("*.toml")}
    wanted |= {f"invrl/requirements/{path.name}" for path in (ROOT / "launch" / "requirements").glob("*.txt")}
    wanted |= {f"rollout_fns/{path.name}" for path in (ROOT / "rollout_fns").glob("*.py")}
    wanted |= {f"rollout_fns/your_task/{path.name}" for path in (ROOT / "rollout_fns/your_task").glob("*.*")}
    templates = ROOT / "invrl" / "gateway" / "rendering" / "templates"
    wanted |= {f"invrl/gateway/rendering/templates/{path.name}" for path in templates.glob("*.jinja")}
    assert sorted(wanted - names) == []
