"""What a run needs of the machine: one check per need, over facts that a test can change.
Each takes the configuration and the `Machine`, and returns what it saw. It raises ConfigError for what
would stop a run, `Doubt` for what may. Nothing is left behind."""

import importlib.metadata
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from invrl.cli import run_checks
from invrl.cli.installation import REQUIREMENTS, install_command
from invrl.errors import ConfigError
from invrl.host import ray_memory
from invrl.run.config import Config

_GB = 1e9
_RAY_DEADLINE_S = 5.0


class Doubt(ConfigError):
    """A run may start with this, and may not get far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts of a machine that no test can plant for real. Bytes are what is free now. `nvidia`: a driver
    is loaded, whether the installed torch can use it or not."""

    python: tuple[int, int]
    cpus: int
    gpus: int
    nvidia: bool
    torch: str
    memory_bytes: int
    memory_total_bytes: int
    shared_memory_bytes: int


def look() -> Machine:
    """This machine. Memory is also bounded by a container's limit."""
    from invrl.engines.engine_server import count_gpus

    memory, memory_total = _memory(Path("/sys/fs/cgroup"))
    return Machine(
        python=sys.version_info[:2],
        cpus=len(os.sched_getaffinity(0)),
        gpus=count_gpus(),
        nvidia=Path("/proc/driver/nvidia/version").exists(),
        torch=_installed("torch") or "(none)",
        memory_bytes=memory,
        memory_total_bytes=memory_total,
        shared_memory_bytes=psutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
    )


def _memory(cgroup: Path) -> tuple[int, int]:
    """Bytes that are free, and bytes in all, in the container whose control group (version 2) is this folder.
    Files that the kernel keeps in memory count as free, as they do for Ray: it drops them when the container
    needs more, and one that has just read a large model is full of them."""
    free = psutil.virtual_memory().available
    total = psutil.virtual_memory().total
    limit = cgroup / "memory.max"
    if not limit.is_file():
        return free, total
    text = limit.read_text().strip()
    if text == "max":
        return free, total
    used = int((cgroup / "memory.current").read_text())
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    kept_files = int(stat["inactive_file"]) + int(stat["active_file"])
    return min(free, int(text) - used + kept_files), min(total, int(text))


def _python(config: Config, machine: Machine) -> str:
    text = ".".join(map(str, machine.python))
    if not (3, 11) <= machine.python < (3, 13):
        fix = "make a virtual environment with Python 3.11 or 3.12 (launch/install.sh of a checkout does it)"
        raise ConfigError("python", text, "invrl needs 3.11 or 3.12", fix)
    return text


def check_packages(config: Config, machine: Machine) -> str:
    """Against what invrl declares, and the pins of what it needs without their dependencies."""
    from packaging.requirements import Requirement

    device = "gpu" if machine.gpus else "cpu"
    file = REQUIREMENTS / f"nodeps{'-gpu' if machine.gpus else ''}.txt"
    pins = [line for line in file.read_text().splitlines() if line[:1] not in "#-"] if file.is_file() else []
    needs = [Requirement(line) for line in (*(importlib.metadata.requires("invrl") or ()), *pins)]
    needs = [need for need in needs if not need.marker or need.marker.evaluate({"extra": device})]
    if config.run.debug_train_only:  # neither engine nor router is started
        needs = [need for need in needs if not need.name.startswith("sglang")]
    wrong = list[str]()
    for need in needs:
        if not (have := _installed(need.name)):
            wrong.append(f"{need.name} is missing")
        elif not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} is {have}, not {need.specifier}")
    if wrong:
        fix = f"run: {install_command(gpu=machine.gpus > 0)}"
        raise ConfigError("packages", "; ".join(wrong), "not what invrl was made for", fix)
    return f"{len(needs)} as required"


def packages_missing(error: ImportError) -> ConfigError:
    """For what could not be imported where it was needed."""
    from invrl.engines.engine_server import count_gpus

    reason = "a package that invrl needs cannot be imported"
    return ConfigError("packages", str(error), reason, f"run: {install_command(gpu=count_gpus() > 0)}")


def _installed(package: str) -> str:
    """Its version; empty if there is none."""
    return next((found.version for found in importlib.metadata.distributions(name=package)), "")


def _gpu(config: Config, machine: Machine) -> str:
    if machine.nvidia and not machine.gpus:
        reason = f"there is an NVIDIA driver, and torch {machine.torch} uses no GPU"
        fix = f"run: {install_command(gpu=True)}; or look at CUDA_VISIBLE_DEVICES"
        raise Doubt("gpu", "CPU", reason, fix)
    return f"{machine.gpus} GPUs" if machine.gpus else f"none: CPU, torch {machine.torch}"


def _cpus(config: Config, machine: Machine) -> str:
    run_checks.check_world(config, cpus=machine.cpus)
    if machine.cpus < 2:
        raise Doubt("cpus", 1, "engine and trainer share it, deadlines may be missed", "use 2 or more")
    return f"{machine.cpus} CPUs"


def _weight_bytes(config: Config) -> int:
    """Of the model as engines hold it; 0 if there is none."""
    files = config.model.folder.glob("*.safetensors") if config.model.model_path else ()
    return sum(file.stat().st_size for file in files) * (2 if config.engine.engine_dtype == "float32" else 1)


def memory_warning(config: Config, machine: Machine) -> str:
    """What `invrl train` says of the memory that it starts with; "" if it is enough. An estimate refuses no
    run. Raises ConfigError where Ray would kill the run's processes whatever it needs."""
    if os.environ.get("RAY_ADDRESS"):  # whose monitor looks at other machines
        return ""
    try:
        check_memory(config, machine)
    except ConfigError as error:
        if machine.memory_bytes <= _kept_free(machine):
            raise
        return f"memory: {error.value}: {error.reason}. Fix: {error.fix}"
    return ""


def _kept_free(machine: Machine) -> float:
    """Bytes: when less is free, whoever uses the rest, Ray begins to kill."""
    return (1 - ray_memory.threshold()) * machine.memory_total_bytes


def check_memory(config: Config, machine: Machine) -> str:
    """An engine is 1.5 GB and its weights twice; the arena has two slots; the rest of the run is 2 GB. A rank
    is 1 GB, and 20 bytes for each bfloat16 weight: the weight, float32 gradient, master weight and moments,
    and what a step computes. Saving a checkpoint adds a tensor or two, as it is written tensor by tensor.
    Where several ranks share the optimizer's state, each holds all of it once while it loads one: 24 bytes.
    On a GPU engines and ranks hold theirs elsewhere, and pass through memory once. The last part of the
    machine's memory is not the run's: when it is touched, by whomever, Ray kills ranks and workers."""
    weights = _weight_bytes(config)
    engines, ranks = config.engine.num_engines, config.train.data_parallel_size
    per_rank = _GB + (10 if ranks == 1 else 12) * weights
    on_cpu = engines * (1.5 * _GB + 2 * weights) + ranks * per_rank
    need = 2 * _GB + 2 * weights + (weights * (engines + ranks) if machine.gpus else on_cpu)
    margin = _kept_free(machine)
    value = (
        f"{machine.memory_bytes / _GB:.1f} GB free, about {need / _GB:.1f} GB needed beside the "
        f"{margin / _GB:.1f} GB at which Ray begins to kill"
    )
    usable = machine.memory_bytes - margin
    fix = "end other programs, or use a smaller model or fewer --num-engines and --data-parallel-size"
    if usable <= 0:
        reason = "Ray would kill the run's first processes"
        fix = "end other programs, or raise RAY_memory_usage_threshold in the environment (0.98, say)"
        raise ConfigError("memory", value, reason, fix)
    if usable < 0.6 * need:
        raise ConfigError("memory", value, "processes of the run would be killed", fix)
    if usable < need:
        raise Doubt("memory", value, "it may not be enough", fix)
    return value


def _disk(config: Config, machine: Machine) -> str:
    """A checkpoint holds the model twice, for Megatron and for Hugging Face, float32 weights and two moments:
    8 times bfloat16. One is written beside those that are kept (`keep_checkpoints` 0: every one, and nobody
    knows how many)."""
    root = Path(config.run.run_root).expanduser().absolute()
    while not root.is_dir() and root != root.parent:
        root = root.parent
    free = psutil.disk_usage(str(root)).free
    checkpoint = 8 * _weight_bytes(config)
    folders = (config.run.keep_checkpoints or 1) + 1
    need = folders * checkpoint + _GB
    value = (
        f"{free / _GB:.1f} GB free at {root}, about {checkpoint / _GB:.1f} GB per checkpoint and "
        f"{need / _GB:.1f} GB for {folders} of them"
    )
    if free < checkpoint + _GB:
        fix = "free some, or give another --run-root"
        raise ConfigError("run.run_root", value, "the disk would fill", fix)
    if free < need:
        fix = "free some, give another --run-root, or lower --keep-checkpoints"
        raise Doubt(
            "run.run_root", value, "the disk may fill: a checkpoint is written beside those kept", fix
        )
    return value


def _shared_memory(config: Config, machine: Machine) -> str:
    """/dev/shm is torch's and Ray's; the weight arena is a memfd, which counts as memory."""
    value = f"{machine.shared_memory_bytes / _GB:.1f} GB free in /dev/shm"
    if machine.shared_memory_bytes < 64e6:
        raise ConfigError("/dev/shm", value, "SGLang's processes need 64 MB", "docker run --shm-size 8g")
    if machine.shared_memory_bytes < _GB:
        raise Doubt("/dev/shm", value, "Ray's objects go to disk then", "docker run --shm-size 8g")
    return value


def _ray(config: Config, machine: Machine) -> str:
    """Whether something listens at RAY_ADDRESS (host:port, or ray://host:port)."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local", "auto"):
        return "auto: one that runs on this machine" if address == "auto" else "a run starts one of its own"
    fix = "start it (`ray start --head`), correct RAY_ADDRESS, or unset it"
    try:
        parts = urlsplit(address if "://" in address else f"ray://{address}")
        if not parts.hostname or not parts.port:
            raise ValueError("not of the form host:port")
        socket.create_connection((parts.hostname, parts.port), timeout=_RAY_DEADLINE_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError("RAY_ADDRESS", address, f"no Ray can be reached there ({error})", fix) from error
    return f"{address} answers"


MACHINE_CHECKS: dict[str, Callable[[Config, Machine], str]] = {
    "python": _python,
    "packages": check_packages,
    "gpu": _gpu,
    "cpus": _cpus,
    "memory": check_memory,
    "disk": _disk,
    "shared memory": _shared_memory,
    "ray": _ray,
}
