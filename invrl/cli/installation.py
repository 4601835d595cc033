"""Installs what invrl needs beyond its own dependencies: torch, SGLang and Megatron, in pinned versions.

In a checkout `launch/install.sh` makes the whole environment. An installed wheel brings what the command line
and the gateway need; `invrl install` adds the rest, into the environment that invrl itself runs in. It takes
two steps, because SGLang (on CPU) and Megatron declare packages that only CUDA machines can install: both are
installed without their dependencies, and the extras `cpu` and `gpu` name the dependencies that are needed."""

import importlib.metadata
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from invrl.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
REQUIREMENTS = PACKAGE / "requirements"
"""Pinned versions, and the packages that are installed without their dependencies."""
_INSTALL_SCRIPT = PACKAGE.parent / "launch" / "install.sh"


def install_command(*, gpu: bool) -> str:
    """The shell command that installs what is missing, as the fix of an error."""
    device = "gpu" if gpu else "cpu"
    if _INSTALL_SCRIPT.is_file():
        return f"INVRL_DEVICE={device} {_INSTALL_SCRIPT}"
    return f"invrl install --device {device}"


def install(device: str) -> None:
    """Run the installer for "cpu" or "gpu", with its output on the terminal.

    Raises ConfigError if there is no installer, or with the command that failed.
    """
    for command in install_steps(device):
        print("+", shlex.join(command), flush=True)
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            reason = f"it ended with exit code {done.returncode}; its output above says why"
            raise ConfigError("install", shlex.join(command), reason, "mend the cause and repeat the command")


def install_steps(device: str) -> list[list[str]]:
    """The installer's command lines, in order. Raises ConfigError if there is neither pip nor uv."""
    suffix = {"cpu": "", "gpu": "-gpu"}[device]
    pins = REQUIREMENTS / f"constraints{suffix}.txt"
    without_dependencies = REQUIREMENTS / f"nodeps{suffix}.txt"
    installer = _installer()
    return [
        [*installer, "-c", str(pins), f"invrl[{device}]"],
        [*installer, "--no-deps", "-r", str(without_dependencies)],
    ]


def nvidia_driver_works() -> bool:
    """Whether `nvidia-smi` answers, as launch/install.sh decides too. torch may not be installed yet."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        return subprocess.run([program], capture_output=True, check=False, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _installer() -> list[str]:
    """`pip install` of this environment, or uv's where the environment has no pip."""
    # Not importlib.util.find_spec("pip"): setuptools takes that for a run of pip and leaves distutils alone,
    # and then Megatron, which imports setuptools, cannot be imported in this process any more.
    if any(importlib.metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    if uv is None:
        reason = "this Python has no pip, and there is no uv on PATH"
        raise ConfigError("install", sys.executable, reason, f"run: {sys.executable} -m ensurepip")
    return [uv, "pip", "install", "--python", sys.executable]
