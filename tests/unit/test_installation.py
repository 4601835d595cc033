"""invrl as an installed package: presets by name, what is in the wheel, what a missing
package is called."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny_model import make_tiny_model
from wheel import build_wheel

from invrl.cli import installation
from invrl.cli import main as cli
from invrl.cli.commands import install as install_command_module
from invrl.cli.flags import parse_flags
from invrl.cli.presets import preset_names
from invrl.errors import ConfigError
from invrl.gateway.rendering import chat_template
from invrl.run.settings.config import resolve
from invrl.run.settings.resolved_config import load_resolved

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "invrl" / "presets"
SITE = Path(sysconfig.get_path("purelib"))


def test_preset_is_found_by_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert preset_names() == sorted(path.stem for path in CONFIGS.glob("*.toml"))
    for name in preset_names():
        assert resolve(*parse_flags(["--config", name])) == load_resolved(
            CONFIGS / f"{name}.toml"
        )
    (tmp_path / "quickstart").write_text("[run]\nnum_steps = 77\n")
    assert resolve(*parse_flags(["--config", "quickstart"])).run.num_steps == 77, (
        "a file of that name wins"
    )


def test_path_of_a_preset_outside_of_a_checkout_suggests_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show-config", "--config", "launch/configs/quickstart.toml"]) == 2
    assert "--config quickstart" in capsys.readouterr().err
    assert cli.main(["show-config", "--config", "no_such.toml"]) == 2
    assert "there is neither such" in capsys.readouterr().err


def test_missing_package_is_reported_before_the_template_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers puts it when it has to render and jinja2 is not installed."""

    def render(*_: object, **__: object) -> str:
        raise ImportError("apply_chat_template requires jinja2 to be installed")

    model = make_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(chat_template.JinjaTemplate, "__call__", render)
    cli.main(["doctor", "--model-path", str(model), "--run-root", str(tmp_path)])
    [line] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "chat template:" in line
    ]
    assert "requires jinja2" in line
    assert "repair chat_template" not in line
    assert installation.install_command(gpu=False) in line

    folder = tmp_path / "site" / "invrl-0.1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: invrl\nVersion: 0.1.0\nRequires-Dist: nobody-has-it\n"
    )
    monkeypatch.syspath_prepend(folder.parent)
    assert (
        cli.main(
            ["serve", "--model-path", str(model), "--run-root", str(tmp_path / "runs")]
        )
        == 2
    )
    assert "nobody-has-it is missing" in capsys.readouterr().err


def test_install_command_named_by_an_error_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = shlex.split(installation.install_command(gpu=False))[-1]
    assert os.access(script, os.X_OK), "a checkout's"
    # as in an installed wheel
    monkeypatch.setattr(installation, "_INSTALL_SCRIPT", tmp_path / "install.sh")
    assert installation.install_command(gpu=True) == "invrl install --device gpu"


def test_install_command_of_a_folder_with_spaces_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "my Müll" / "install.sh"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\necho "for $INVRL_DEVICE"\n')
    script.chmod(0o755)
    monkeypatch.setattr(installation, "_INSTALL_SCRIPT", script)
    command = installation.install_command(gpu=True)
    assert subprocess.check_output(command, shell=True, text=True) == "for gpu\n"


def test_command_for_a_python_without_pip_can_be_pasted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", "/my folder/bin/python")
    with pytest.raises(ConfigError) as caught:
        installation.install_steps("cpu")
    command = caught.value.fix.removeprefix("run: ")
    assert shlex.split(command) == ["/my folder/bin/python", "-m", "ensurepip"]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_install_steps_use_requirement_files_of_the_package(device: str) -> None:
    with_dependencies, without = installation.install_steps(device)
    assert with_dependencies[-1] == f"invrl[{device}]"
    assert "--no-deps" in without
    for command in (with_dependencies, without):
        [file] = [word for word in command if word.endswith(".txt")]
        assert Path(file).is_relative_to(installation.PACKAGE)
        assert Path(file).is_file()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_install_says_its_size_and_refuses_a_disk_that_is_too_full(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = installation.install_size(device)
    assert 1 <= size.download_gb < size.disk_gb / 2 < 10
    started: list[object] = []
    monkeypatch.setattr(installation, "_run", started.append)
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)

    def leave_free(num_bytes: float) -> None:
        usage = shutil.disk_usage("/")._replace(free=int(num_bytes))
        monkeypatch.setattr(installation.shutil, "disk_usage", lambda folder: usage)

    leave_free(size.disk_gb * 1e9 - 2e8)
    with pytest.raises(
        ConfigError, match=f"need about {size.download_gb:g} GB"
    ) as caught:
        installation.install(device)
    assert f"{size.disk_gb - 0.2:.1f} GB are free" in caught.value.reason
    assert not started
    assert f"{size.disk_gb:g} GB on disk" in capsys.readouterr().out
    leave_free(size.disk_gb * 1e9)
    installation.install(device)
    assert len(started) == 1


def test_failed_install_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit(3)"]
    monkeypatch.setattr(installation, "install_steps", lambda device: [failing])
    with pytest.raises(ConfigError, match="exit code 3"):
        installation.install("cpu")


def test_missing_pip_and_uv_is_an_error_with_a_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: [])
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        installation.install_steps("cpu")
    monkeypatch.setattr(installation.shutil, "which", lambda name: "/somewhere/uv")
    assert installation.install_steps("cpu")[0][:3] == [
        "/somewhere/uv",
        "pip",
        "install",
    ]


def test_install_command_uses_the_found_or_given_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(install_command_module, "install_packages", devices.append)
    for driver_works in (False, True):
        monkeypatch.setattr(
            install_command_module,
            "nvidia_driver_works",
            lambda works=driver_works: works,
        )
        assert cli.main(["install"]) == 0
    assert cli.main(["install", "--device", "cpu"]) == 0
    assert devices == ["cpu", "gpu", "cpu"]
    assert cli.main(["install", "--device", "tpu"]) == 2
    assert "--device cpu or --device gpu" in capsys.readouterr().err


def test_every_dependency_is_imported_somewhere() -> None:
    """Ours by our own code, those of the cpu extra by SGLang or Megatron too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = imported_names([ROOT / "invrl", ROOT / "rollout_fns"])
    for line in project["dependencies"]:
        # transformers' templates
        assert module_of(line) in ours | {"jinja2"}, f"{line}: nothing imports it"
    # FastAPI's forms
    upstream = imported_names([SITE / "sglang", SITE / "megatron"]) | {"multipart"}
    for line in project["optional-dependencies"]["cpu"]:
        assert module_of(line) in ours | upstream, f"{line}: nothing imports it"


def test_gpu_extra_has_what_sglang_asks_for_but_the_stub() -> None:
    """SGLang is installed without its dependencies, and pip knows no overrides."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    ours = {requirement.name for requirement in map(Requirement, extras["gpu"])}
    environment = {"extra": "", "platform_machine": "x86_64", "sys_platform": "linux"}
    theirs = {
        requirement.name
        for requirement in map(Requirement, importlib.metadata.requires("sglang") or ())
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }
    assert theirs - ours == {"cuda-tile"}
    pins = (installation.REQUIREMENTS / "constraints-gpu.txt").read_text()
    assert "cuda-tile==1.6.0\n" in pins


def module_of(requirement: str) -> str:
    """The module that a distribution is imported as."""
    name = re.split(r"[=<>\[]", requirement)[0]
    other_names = {
        "pillow": "PIL",
        "pyzmq": "zmq",
        "python-multipart": "multipart",
        "apache-tvm-ffi": "tvm_ffi",
    }
    return other_names.get(name, name.replace("-", "_"))


def imported_names(folders: list[Path]) -> set[str]:
    pattern = re.compile(r"^\s*(?:import|from) ([A-Za-z_]\w*)", re.MULTILINE)
    return {
        name
        for folder in folders
        for path in folder.rglob("*.py")
        for name in pattern.findall(path.read_text(errors="replace"))
    }


def test_the_wheel_holds_the_product_and_its_examples_alone(
    tmp_path: Path,
) -> None:
    wheel = build_wheel(tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"invrl/py.typed"}
    wanted |= {f"invrl/presets/{path.name}" for path in CONFIGS.glob("*.toml")}
    wanted |= {
        f"invrl/requirements/{path.name}"
        for path in (ROOT / "invrl" / "requirements").glob("*.txt")
    }
    wanted |= {
        f"rollout_fns/{path.name}" for path in (ROOT / "rollout_fns").glob("*.py")
    }
    wanted |= {
        f"rollout_fns/your_task/{path.name}"
        for path in (ROOT / "rollout_fns/your_task").glob("*.*")
    }
    templates = ROOT / "invrl" / "gateway" / "rendering" / "templates"
    wanted |= {
        f"invrl/gateway/rendering/templates/{path.name}"
        for path in templates.glob("*.jinja")
    }
    assert sorted(wanted - names) == []
    folders = {name.partition("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {
        "invrl",
        "rollout_fns",
    }
