"""Installs the packages beyond invrl's own dependencies: torch, SGLang and Megatron, in
pinned versions; and optionally smg.

In a checkout, `launch/install.sh` makes the whole environment. An installed wheel
suffices for the command line and the gateway; `invrl install` adds the rest to invrl's
environment.

The installation takes two steps, because SGLang (on CPU) and Megatron declare
dependencies that only CUDA machines can install. Both are installed without their
dependencies; the extras `cpu` and `gpu` name the necessary ones.
"""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from invrl.engines.router import smg
from invrl.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
REQUIREMENTS = PACKAGE / "requirements"
"""Pinned versions, and the packages that are installed without their dependencies."""
_INSTALL_SCRIPT = PACKAGE.parent / "launch" / "install.sh"


_SUFFIX = {"cpu": "", "gpu": "-gpu"}
_SIZE_LINE = re.compile(
    r"^# Size: ([\d.]+) GB to download, ([\d.]+) GB on disk\.", re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSize:
    """Size of all packages for a device, in GB, as the head of its pins says it."""

    download_gb: float
    disk_gb: float

    def __str__(self) -> str:
        return f"about {self.download_gb:g} GB to download, {self.disk_gb:g} GB on disk"


def install_command(*, gpu: bool) -> str:
    """Return the shell command that installs missing packages, as the fix of an
    error."""
    device = "cpu"
    if gpu:
        device = "gpu"
    if _INSTALL_SCRIPT.is_file():
        return f"INVRL_DEVICE={device} {shlex.quote(str(_INSTALL_SCRIPT))}"
    return f"invrl install --device {device}"


def install(device: str) -> None:
    """Run the installer for "cpu" or "gpu", with its output on the terminal.

    Raises ConfigError if there is no installer or too little room on the disk, or with
    the command that failed.
    """
    steps = install_steps(device)
    size = install_size(device)
    print(f"installing for {device}: {size}", flush=True)
    if importlib.util.find_spec("torch") is None:  # else most of it is there
        _check_room(Path(sysconfig.get_path("purelib")), size)
    _run(steps)


def install_size(device: str) -> InstallSize:
    """Return the size of the packages for "cpu" or "gpu"."""
    found = _SIZE_LINE.search(_pins(device).read_text(encoding="utf-8"))
    assert found is not None, "a test reads them"
    return InstallSize(download_gb=float(found[1]), disk_gb=float(found[2]))


def _check_room(folder: Path, size: InstallSize) -> None:
    """Raise ConfigError unless the packages fit on the disk of the folder. The
    installer's cache may need as much again on another disk."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < size.disk_gb:
        reason = f"{free_gb:.1f} GB are free on its disk, and the packages need {size}"
        fix = "free some space, or use an environment on another disk"
        raise ConfigError("install", str(folder), reason, fix)


def install_smg() -> None:
    """Make the virtual environment of smg, as `install` does."""
    _run(smg_steps())


def _run(steps: Iterable[Sequence[str]]) -> None:
    for command in steps:
        print("+", shlex.join(command), flush=True)
        process = subprocess.run(command, check=False)
        if process.returncode != 0:
            reason = f"it ended with exit code {process.returncode}; its output above says why"
            fix = "repair the cause and repeat the command"
            raise ConfigError("install", shlex.join(command), reason, fix)


def install_steps(device: str) -> list[list[str]]:
    """Return the installer's command lines, in order. Raises ConfigError if there is
    neither pip nor uv."""
    without_dependencies = REQUIREMENTS / f"nodeps{_SUFFIX[device]}.txt"
    installer = _installer()
    return [
        [*installer, "-c", str(_pins(device)), f"invrl[{device}]"],
        [*installer, "--no-deps", "-r", str(without_dependencies)],
    ]


def _pins(device: str) -> Path:
    return REQUIREMENTS / f"constraints{_SUFFIX[device]}.txt"


def smg_steps() -> list[list[str]]:
    """Return the command lines that make smg's virtual environment, in order. Raises
    ConfigError if neither this Python nor uv can make one."""
    folder = str(smg.INSTALLED_FOLDER)
    python = str(smg.INSTALLED_FOLDER / "bin" / "python")
    requirement = f"smg=={smg.VERSION}"
    if importlib.util.find_spec("ensurepip"):
        return [
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", requirement],
        ]
    uv = shutil.which("uv")
    if uv is None:
        reason = "this Python cannot make a virtual environment with pip, and there is no uv on PATH"
        raise ConfigError(
            "install", sys.executable, reason, "install its venv package (python3-venv)"
        )
    return [
        [uv, "venv", "--clear", "--python", sys.executable, folder],
        [uv, "pip", "install", "--python", python, requirement],
    ]


def nvidia_driver_works() -> bool:
    """Whether `nvidia-smi` succeeds, as launch/install.sh decides. torch may not be
    installed yet, so it cannot be asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        process = subprocess.run(
            [program], capture_output=True, check=False, timeout=60
        )
    except subprocess.TimeoutExpired:
        return False
    return process.returncode == 0


def _installer() -> list[str]:
    """Return `pip install` of this environment, or uv's if the environment has no
    pip."""
    # Not importlib.util.find_spec("pip"): setuptools would then assume that pip is
    # running and would not replace distutils. Megatron, which imports setuptools, could
    # no longer be imported in this process.
    if any(importlib.metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    if uv is None:
        reason = "this Python has no pip, and there is no uv on PATH"
        fix = f"run: {shlex.join([sys.executable, '-m', 'ensurepip'])}"
        raise ConfigError("install", sys.executable, reason, fix)
    return [uv, "pip", "install", "--python", sys.executable]
