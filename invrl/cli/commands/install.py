"""`invrl install`: completes an installed wheel with torch, SGLang and Megatron."""

from collections.abc import Mapping, Sequence

from invrl.cli.arguments import read_options
from invrl.cli.installation import install as install_packages
from invrl.cli.installation import install_smg, nvidia_driver_works
from invrl.engines.router.smg import INSTALLED_FOLDER
from invrl.errors import ConfigError


def install(arguments: Sequence[str]) -> None:
    """usage: invrl install [--device cpu|gpu | --router smg]

    Installs torch, SGLang and Megatron, in the versions that invrl is tested with, into
    the Python environment that invrl runs in. Without --device: gpu where `nvidia-smi`
    works, else cpu. It takes a few minutes, and says how large the packages are; a disk
    that is too full is refused.

    A checkout does not need it: launch/install.sh makes its whole environment.

    --router smg installs that router and nothing else, in a virtual environment of its
    own inside this one (about 150 MB). Runs use it with --router smg."""
    options = read_options(arguments, ["--device", "--router"])
    if "--router" in options:
        _install_router(options)
        return
    device = options.get("--device")
    if device is None:
        device = "gpu" if nvidia_driver_works() else "cpu"
    if device not in ("cpu", "gpu"):
        raise ConfigError(
            "--device", device, "no such device", "write --device cpu or --device gpu"
        )
    install_packages(device)
    print("installed; `invrl doctor` checks the machine and the settings of a run")


def _install_router(options: Mapping[str, str]) -> None:
    router = options["--router"]
    if router != "smg":
        raise ConfigError(
            "--router", router, "sglang-router comes with invrl", "write --router smg"
        )
    if "--device" in options:
        reason = "the router is the same for all devices"
        raise ConfigError(
            "--device",
            options["--device"],
            reason,
            "leave it out, or run the command twice",
        )
    install_smg()
    print(f"installed in {INSTALLED_FOLDER}; runs use it with --router smg")
