"""smg as the router: found in its environment, refused by name, its options checked,
its keys and flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_model import make_tiny_model

from invrl.cli import installation
from invrl.cli import main as cli
from invrl.cli.commands import install as install_command
from invrl.engines.config import EngineConfig
from invrl.engines.fleet.fleet import Fleet
from invrl.engines.launch.engine_server import EngineServer
from invrl.engines.launch.sglang_args import ROUTER_OWNED, entry_for, router_flags
from invrl.engines.router import router_server, smg
from invrl.engines.router.router_server import RouterServer
from invrl.errors import ConfigError
from invrl.run.settings.config import Source, resolve

OPTIONS: list[dict[str, Any]] = [
    {
        "dest": "max_payload_size",
        "spellings": ["--max-payload-size"],
        "value_type": "int",
    },
    {
        "dest": "policy",
        "spellings": ["--policy"],
        "value_type": "str",
        "choices": ["manual", "random"],
    },
    {
        "dest": "cache_boundaries",
        "spellings": ["--cache-boundaries"],
        "value_type": "_parse_int_csv",
    },
    {
        "dest": "log_json",
        "spellings": ["--log-json"],
        "kind": "_StoreTrueAction",
        "nargs": 0,
    },
    {
        "dest": "storage_context_headers",
        "spellings": ["--storage-context-headers"],
        "kind": "_ExtendAction",
    }
    | {"nargs": "*"},
    {
        "dest": "enable_mesh",
        "spellings": ["--enable-mesh"],
        "kind": "_StoreTrueAction",
        "nargs": 0,
    },
]
DEFAULTS = {"kind": "_StoreAction", "nargs": None, "value_type": "", "choices": None}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What other tests found is not remembered here, nor what these find in others."""
    smg.find_smg.cache_clear()
    yield
    smg.find_smg.cache_clear()


def environment(folder: Path, program: str) -> Path:
    """A virtual environment whose Python is this program."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{program}\n")
    python.chmod(0o755)
    return folder


def with_version(folder: Path, version: str) -> Path:
    answer = json.dumps(
        {"version": version, "options": [DEFAULTS | option for option in OPTIONS]}
    )
    return environment(folder, f"print({answer!r})")


@pytest.fixture
def found(tmp_path: Path) -> smg.Smg:
    return smg.find_smg(str(with_version(tmp_path / "smg", smg.VERSION)))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "there is no virtual environment"),
        (
            'raise ModuleNotFoundError("No module named smg")',
            "has none that works: ModuleNotFoundError",
        ),
        (
            'print(\'{"version": "1.12.0", "options": []}\')',
            "has version 1.12.0, not 1.13.0",
        ),
    ],
    ids=["nothing", "no smg", "another version"],
)
def test_missing_smg_is_refused_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str | None, reason: str
) -> None:
    """By every command that starts a router, before any process."""
    folder = tmp_path / "smg"
    if program is not None:
        environment(folder, program)
    model = make_tiny_model(tmp_path / "tiny")
    runs = tmp_path / "runs"
    flags = ["--model-path", str(model), "--run-root", str(runs), "--router", "smg"]
    assert cli.main(["serve", *flags, "--engine.smg-environment", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "engine.router\n  value:  'smg'" in error
    assert reason in error
    assert str(folder) in error
    assert "invrl install --router smg" in error
    assert not runs.exists()


def test_smg_options_are_checked_like_the_options_of_the_sglang_router(
    found: smg.Smg,
) -> None:
    options = {"max-payload-size": 10, "log_json": True, "cache-boundaries": "1,2"}
    flags = ["--max-payload-size", "10", "--log-json", "--cache-boundaries", "1,2"]
    assert router_flags(options, found) == flags
    assert router_flags({"storage-context-headers": "a b"}, found) == [
        "--storage-context-headers",
        "a",
        "b",
    ]
    refused = {
        "max-payload-size": ("x", "invalid int value"),
        "policy": ("manul", "invalid choice"),
        "log-jsn": ("true", "no such field"),
        "enable-mesh": ("true", "invrl sets this itself"),
    }
    for name, (value, reason) in refused.items():
        with pytest.raises(ConfigError, match=reason):
            router_flags({name: value}, found)
    with pytest.raises(ConfigError, match="no such field"):
        router_flags({"log-json": "true"})  # sglang-router has none


def test_smg_options_set_by_invrl_exist() -> None:
    try:
        installed = smg.find_smg("")
    except ConfigError as error:
        pytest.skip(str(error))
    names = {option.dest for option in installed.options}
    spellings = {
        spelling for option in installed.options for spelling in option.spellings
    }
    for name in smg.OWNED:
        assert any(entry_for(dest, {name: True}) for dest in names), name
    for name in (*smg.FLAGS, *router_server._FLAGS):
        assert f"--{name}" in spellings
    assert {*smg.SWITCHES, *router_server._SWITCHES} <= spellings
    assert {
        name
        for name in ROUTER_OWNED
        if not any(entry_for(dest, {name: True}) for dest in names)
    } == {"mini_lb"}
    value_types = {option.value_type for option in installed.options}
    assert value_types - set(smg._VALUE_TYPES) == {
        "",
        "str",
        "lower",
        "<lambda>",
        "_parse_int_csv",
    }


@dataclass
class Starts:
    """What would have been started, by name."""

    commands: dict[str, list[str]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def value(self, name: str, flag: str) -> str:
        command = self.commands[name]
        return command[command.index(flag) + 1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()

    def start(
        self: object,
        name: str,
        command: list[str],
        *,
        log: Path,
        env: Mapping[str, str],
        **_: object,
    ) -> None:
        starts.commands[name] = command
        starts.keys[name] = env["INVRL_KEY_FLAGS"]

    monkeypatch.setattr("invrl.host.processes.process.ServerProcess.__init__", start)
    monkeypatch.setattr(
        "invrl.engines.launch.engine_launcher.ForkParent", lambda module, log: None
    )
    return starts


def behind_smg(found: smg.Smg) -> EngineConfig:
    environment = str(found.python.parents[1])
    settings = {"router": "smg", "smg_environment": environment, "num_engines": 2}
    return resolve(Source(name="test", tables={"engine": settings})).engine


def test_smg_calls_its_engines_with_the_given_key(
    found: smg.Smg, tmp_path: Path, tiny_model: Path, starts: Starts
) -> None:
    """It hands the caller's key to an engine; sglang-router gives each engine the
    engine's own."""
    commands = starts.commands
    config = behind_smg(found)
    fleet = Fleet(config, tiny_model, tmp_path, router={"max-payload-size": 10})
    first = fleet._processes.launch("engine-0")
    second = fleet._processes.launch("engine-1")
    assert first.server.api_key == second.server.api_key == fleet.router.api_key
    assert f"--api-key={fleet.router.api_key}" in starts.keys["engine-0"].split()
    assert first.server.admin_key != second.server.admin_key
    assert fleet.router.api_key not in "".join(commands["router"])
    assert commands["router"][0] == str(found.python)
    assert commands["router"][-2:] == ["--max-payload-size", "10"]
    assert fleet.router.program == f"smg {smg.VERSION}"

    other = RouterServer(run_folder=tmp_path, start_timeout_s=1.0)
    assert commands["router"][0] == sys.executable
    assert other.engine_api_key is None
    server = EngineServer(
        "engine-2", config, model_path=tiny_model, run_folder=tmp_path
    )
    assert server.api_key not in (other.api_key, fleet.router.api_key)
    for started in (first.server, second.server, server):
        assert isinstance(started, EngineServer)
        started._temporary.remove()


def test_smg_in_front_of_the_engines_for_evaluation_is_a_second_one_alike(
    found: smg.Smg, tmp_path: Path, tiny_model: Path, starts: Starts
) -> None:
    flags = {"max-payload-size": 10}
    fleet = Fleet(behind_smg(found), tiny_model, tmp_path, router=flags, eval_engines=1)
    assert fleet.eval_router is not None
    launched = [fleet._processes.launch(name) for name in ("engine-0", "engine-1")]
    routers = {"router": fleet.router, "eval-router": fleet.eval_router}
    for (name, router), engine in zip(routers.items(), launched, strict=True):
        command = starts.commands[name]
        assert command[0] == str(found.python)
        assert router.url.endswith(f":{starts.value(name, '--port')}")
        for flag, value in smg.FLAGS.items():
            assert starts.value(name, f"--{flag}") == value
        assert set(smg.SWITCHES) <= set(command)
        assert command[-2:] == ["--max-payload-size", "10"]
        assert f"--api-key={router.api_key}" in starts.keys[name].split()
        assert engine.server.api_key == router.api_key
    keys = {router.api_key for router in routers.values()}
    management = {router.address.management_key for router in routers.values()}
    assert len(keys | management) == 4
    ports = {
        starts.value(name, flag)
        for name in routers
        for flag in ("--port", "--prometheus-port")
    }
    assert len(ports) == 4
    for engine in launched:
        assert isinstance(engine.server, EngineServer)
        engine.server._temporary.remove()


def test_smg_environment_without_smg_is_refused() -> None:
    with pytest.raises(ConfigError, match="add --router smg"):
        resolve(
            Source(name="test", tables={"engine": {"smg_environment": "/somewhere"}})
        )


def test_smg_install_command_makes_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installs: list[str] = []
    monkeypatch.setattr(install_command, "install_packages", installs.append)
    monkeypatch.setattr(install_command, "install_smg", lambda: installs.append("smg"))
    assert cli.main(["install", "--router", "smg"]) == 0
    assert cli.main(["install", "--router", "sglang-router"]) == 2
    assert "--router smg" in capsys.readouterr().err
    assert cli.main(["install", "--router", "smg", "--device", "cpu"]) == 2
    assert installs == ["smg"]

    for command in installation.smg_steps():
        assert str(smg.INSTALLED_FOLDER) in " ".join(command)
    assert installation.smg_steps()[-1][-1] == f"smg=={smg.VERSION}"
    monkeypatch.setattr(installation.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(installation.shutil, "which", lambda name: "/somewhere/uv")
    assert [command[0] for command in installation.smg_steps()] == [
        "/somewhere/uv",
        "/somewhere/uv",
    ]
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="python3-venv"):
        installation.smg_steps()
