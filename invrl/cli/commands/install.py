"""`invrl install`: completes an installed wheel with torch, SGLang and Megatron."""

from collections.abc import Sequence

from invrl.cli.arguments import read_options
from invrl.cli.installation import install as install_packages
from invrl.cli.installation import nvidia_driver_works
from invrl.errors import ConfigError


def install(arguments: Sequence[str]) -> None:
    """usage: invrl install [--device cpu|gpu]

    Installs torch, SGLang and Megatron, in the versions that invrl is tested with, into the Python
    environment that invrl runs in. Without --device: gpu where `nvidia-smi` works, else cpu. It takes a
    few minutes, and about 3 GB on cpu.

    A checkout does not need it: launch/install.sh makes its whole environment."""
    options = read_options(arguments, ["--device"])
    device = options.get("--device", "")
    if not device:
        device = _detect_device()
    if device not in ("cpu", "gpu"):
        raise ConfigError("--device", device, "no such device", "write --device cpu or --device gpu")
    install_packages(device)
    print("installed; `invrl doctor` checks the machine and the settings of a run")


def _detect_device() -> str:
    if nvidia_driver_works():
        return "gpu"
    return "cpu"
