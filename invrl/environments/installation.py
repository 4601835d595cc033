"""The virtual environment of an environment: making it with uv, and asking the program
in it which arguments it takes.

It lies in the user's cache, named by its Python and packages: other pins get another
one. `installed` is written last, so that a half-made one is made again.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from invrl.environments.environment_folder import EnvironmentFolder
from invrl.errors import ConfigError
from invrl.host.files.cache_folder import cache_folder

PROGRAM = Path(__file__).with_name("episodes.py")
_DESCRIBE_DEADLINE_S = 120.0
_NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYENV_VERSION"}
Value = str | int | float | bool


class Argument(NamedTuple):
    """An argument of an environment."""

    type: str
    """"str", "int", "float" or "bool"."""
    default: Value


class Description(NamedTuple):
    """What the program of an environment says of itself."""

    about: str
    reward: Sequence[str]
    """Least and most."""
    arguments: Mapping[str, Argument]


def virtual_environment(environment: EnvironmentFolder) -> Path:
    """Return the folder of the virtual environment, made or not."""
    name = f"{environment.name}-{environment.digest}"
    return cache_folder("environments") / name


def is_installed(environment: EnvironmentFolder) -> bool:
    """Whether it is, and the Python that it was made with is still there."""
    return _marker(environment).exists() and _python(environment).exists()


def program_command(environment: EnvironmentFolder, mode: str) -> list[str]:
    """Return the command that runs `episodes.py` with the environment's Python."""
    return [str(_python(environment)), "-P", str(PROGRAM), str(environment.path), mode]


def program_variables(environment: EnvironmentFolder) -> dict[str, str]:
    """Return the variables of its processes: ours, without those that would show it
    our packages, and with its own programs first on the path."""
    variables = {
        name: value for name, value in os.environ.items() if name not in _NOT_INHERITED
    }
    own = virtual_environment(environment) / "bin"
    variables["PATH"] = os.pathsep.join([str(own), os.environ.get("PATH", os.defpath)])
    return variables


def install(environment: EnvironmentFolder) -> None:
    """Make the virtual environment, with uv's output on the terminal. Raises
    ConfigError."""
    uv = _uv()
    python = _find_python(uv, environment)
    folder = virtual_environment(environment)
    _marker(environment).unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([uv, "venv", "--clear", "--python", python, str(folder)])
    if environment.requirements:
        into = str(_python(environment))
        pins = str(environment.path / "requirements.txt")
        _run([uv, "pip", "install", "--no-deps", "--python", into, "-r", pins])
    describe(environment)
    _marker(environment).write_text(environment.digest, encoding="utf-8")


def check_installed(field: str, environment: EnvironmentFolder) -> None:
    """Raise ConfigError about `field` unless the environment is installed."""
    if not is_installed(environment):
        missing = _marker(environment)
        if missing.exists():
            missing = _python(environment)
        reason = f"not installed: there is no {missing}"
        fix = f"run: invrl environment install {shlex.quote(environment.called)}"
        raise ConfigError(field, environment.called, reason, fix)


def describe(environment: EnvironmentFolder) -> Description:
    """Ask the program what it takes. Raises ConfigError if it fails or hangs."""
    command = program_command(environment, "describe")
    field = "environment"
    fix = f"repair {environment.path / 'environment.py'}"
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            check=False,
            encoding="utf-8",
            env=program_variables(environment),
            timeout=_DESCRIBE_DEADLINE_S,
        )
    except subprocess.TimeoutExpired as error:
        reason = f"it did not describe itself within {_DESCRIBE_DEADLINE_S:g} s"
        raise ConfigError(field, environment.called, reason, fix) from error
    if process.returncode != 0:
        reason = f"it cannot describe itself: {process.stderr.strip()[-1000:]}"
        raise ConfigError(field, environment.called, reason, fix)
    [*_, line] = process.stdout.splitlines()
    described = json.loads(line)
    arguments = {
        name: Argument(**argument) for name, argument in described["arguments"].items()
    }
    return Description(described["about"], described["reward"], arguments)


def _python(environment: EnvironmentFolder) -> Path:
    return virtual_environment(environment) / "bin" / "python"


def _marker(environment: EnvironmentFolder) -> Path:
    return virtual_environment(environment) / "installed"


def _uv() -> str:
    """Return the path of uv. Raises ConfigError."""
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        reason = "there is no uv on PATH, which makes the virtual environments"
        fix = f"run: {shlex.join([sys.executable, '-m', 'pip', 'install', 'uv'])}"
        raise ConfigError("install", "uv", reason, fix)
    return uv


def _find_python(uv: str, environment: EnvironmentFolder) -> str:
    """Return the path of the environment's Python. Raises ConfigError."""
    version = environment.python
    process = subprocess.run(
        [uv, "python", "find", "--system", "--no-python-downloads", version],
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=_DESCRIBE_DEADLINE_S,
    )
    if process.returncode != 0:
        reason = f"{environment.called} needs Python {version}, and uv finds none"
        fix = f"run: uv python install {version}"
        raise ConfigError(".python-version", version, reason, fix)
    return process.stdout.strip()


def _run(command: list[str]) -> None:
    print("+", shlex.join(command), flush=True)
    process = subprocess.run(command, check=False)
    if process.returncode != 0:
        reason = (
            f"it ended with exit code {process.returncode}; its output above says why"
        )
        fix = "repair the cause and repeat the command"
        raise ConfigError("install", shlex.join(command), reason, fix)
