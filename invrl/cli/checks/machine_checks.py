"""A run's requirements on the machine: one function per check, over facts that a test
can change.

A check takes the configuration and the `Machine`, and returns what it found. It raises
ConfigError for what would stop a run, and `CheckWarning` for what may.
"""

import importlib.metadata
import math
import os
import socket
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from invrl.algorithms.objectives.objectives import objective_needs
from invrl.cli.checks.check_warnings import CheckWarning, LikelyFailure
from invrl.cli.checks.machine import Machine, installed_version
from invrl.cli.checks.settings_checks import longest_conversation
from invrl.cli.installation import REQUIREMENTS, install_command
from invrl.errors import ConfigError
from invrl.host.files.disk import FULL_BYTES, full_disk, space_left
from invrl.host.files.temporary_folder import temporary_parents
from invrl.host.ray import ray_memory
from invrl.run.processes.trainer_memory import trainer_memory
from invrl.run.processes.weight_devices import arena_on_gpu
from invrl.run.settings.config import Config
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.runtime.kernels import Kernels
from invrl.weights.config import FileWeights

_GB = 1e9
_RAY_DEADLINE_S = 5.0
_MIN_SHARED_MEMORY = 64e6
"""Bytes that SGLang's processes need in /dev/shm."""


def check_python(config: Config, machine: Machine) -> str:
    text = ".".join(str(number) for number in machine.python)
    if not (3, 11) <= machine.python < (3, 13):
        fix = "make a virtual environment with Python 3.11 or 3.12 (launch/install.sh of a checkout does it)"
        raise ConfigError("python", text, "invrl needs 3.11 or 3.12", fix)
    return text


def check_packages(config: Config, machine: Machine) -> str:
    """Check the packages against invrl's dependencies, and the pins of those installed
    without dependencies."""
    from packaging.requirements import Requirement

    extra = "cpu"
    pins_file = REQUIREMENTS / "nodeps.txt"
    if machine.gpus:
        extra = "gpu"
        pins_file = REQUIREMENTS / "nodeps-gpu.txt"
    lines = list(importlib.metadata.requires("invrl") or ())
    if pins_file.is_file():
        pins = pins_file.read_text(encoding="utf-8").splitlines()
        lines += [line for line in pins if line and not line.startswith(("#", "-"))]
    needed = 0
    problems: list[str] = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        if config.trains_alone and requirement.name.startswith("sglang"):
            continue  # neither engine nor router is started
        needed += 1
        version = installed_version(requirement.name)
        if not version:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{requirement.name} is {version}, not {requirement.specifier}"
            )
    if problems:
        fix = f"run: {install_command(gpu=machine.gpus > 0)}"
        raise ConfigError(
            "packages", "; ".join(problems), "not the versions that invrl needs", fix
        )
    return f"{needed} as required"


def packages_missing(error: ImportError) -> ConfigError:
    """Return the error for a package that a check could not import."""
    from invrl.engines.launch.engine_server import count_gpus

    reason = "a package that invrl needs cannot be imported"
    return ConfigError(
        "packages", str(error), reason, f"run: {install_command(gpu=count_gpus() > 0)}"
    )


def check_processors(config: Config, machine: Machine) -> str:
    """Check that every trainer rank has its own GPU or CPU. Those of a Ray cluster
    elsewhere are unknown here."""
    layout = config.train.layout
    available = machine.gpus or machine.cpus
    noun = "GPUs" if machine.gpus else "CPUs"
    if layout.world_size > available and not os.environ.get("RAY_ADDRESS"):
        reason = (
            f"this machine has {available} {noun}, and every rank needs one of its own"
        )
        sizes = {
            "tensor_model_parallel_size": layout.tensor,
            "context_parallel_size": layout.context,
            "pipeline_model_parallel_size": layout.pipeline,
        }
        ranks_of_a_copy = math.prod(sizes.values())
        if ranks_of_a_copy > available:
            largest = max(sizes, key=lambda name: sizes[name])
            flags = [
                f"--{name.replace('_', '-')}"
                for name, size in sizes.items()
                if size > 1
            ]
            fix = f"lower {' or '.join(flags)}, so that one copy of the model has {available} ranks or fewer"
            reason = f"{reason}; one copy of the model has {ranks_of_a_copy}"
            raise ConfigError(f"train.{largest}", sizes[largest], reason, fix)
        fix = f"lower --data-parallel-size to {available // ranks_of_a_copy} or less"
        raise ConfigError("train.data_parallel_size", layout.data, reason, fix)
    of_critic = config.critic_layout
    if (
        of_critic is not None
        and config.num_ranks > available
        and not os.environ.get("RAY_ADDRESS")
    ):
        reason = (
            f"this machine has {available} {noun}, and every rank needs one of its own: the policy has "
            f"{layout.world_size} and the critic {of_critic.world_size}"
        )
        fix = "lower it, or leave it out: the critic then shares the policy's ranks"
        raise ConfigError("critic.data_parallel_size", of_critic.data, reason, fix)
    if machine.cpus < 2:
        reason = "engine and trainer share one CPU, so deadlines may be missed"
        raise CheckWarning("cpus", 1, reason, "use 2 or more")
    return f"{machine.cpus} CPUs"


def check_precision(config: Config, machine: Machine) -> str:
    """Check that the processor computes well in the dtypes of engine and trainer. One
    without AVX-512 was seen to train at a tenth of its speed in float32."""
    dtypes = {
        "--engine.dtype": config.engine.dtype,
        "--train-dtype": config.train.train_dtype,
    }
    slow = [flag for flag, dtype in dtypes.items() if dtype == "bfloat16"]
    if machine.is_slow_in_bfloat16 and slow and not machine.gpus:
        reason = "this CPU has no AVX-512, so it computes many times slower in bfloat16 than in float32"
        raise CheckWarning(
            " and ".join(slow),
            "bfloat16",
            reason,
            f"use {' '.join(f'{flag} float32' for flag in slow)}",
        )
    return f"engine {dtypes['--engine.dtype']}, trainer {dtypes['--train-dtype']}"


def check_memory(config: Config, machine: Machine) -> str:
    """Compare the free memory with an estimate (`_needed_memory`) and with Ray's
    reserve: below that Ray kills ranks and workers, whichever program uses the memory.

    Raises ConfigError if Ray would kill the run's processes in any case, LikelyFailure
    if much is missing and CheckWarning if little is: the need is an estimate.
    """
    if os.environ.get("RAY_ADDRESS"):
        return "not checked: RAY_ADDRESS names a cluster that may run on other machines"
    needed = _needed_memory(config, machine)
    margin = (1 - ray_memory.threshold()) * machine.memory_total_bytes
    value = (
        f"{machine.memory_bytes / _GB:.1f} GB free, about {needed / _GB:.1f} GB needed, besides "
        f"{margin / _GB:.1f} GB that must stay free (below it Ray kills processes)"
    )
    usable = machine.memory_bytes - margin
    if usable <= 0:
        reason = "Ray would kill the run's first processes"
        fix = "end other programs, or raise RAY_memory_usage_threshold in the environment (for example 0.98)"
        raise ConfigError("memory", value, reason, fix)
    fix = "end other programs, or use a smaller model or fewer --num-engines and --data-parallel-size"
    if usable < 0.6 * needed:
        raise LikelyFailure(
            "memory", value, "processes of the run would be killed", fix
        )
    if usable < needed:
        raise CheckWarning("memory", value, "it may not be enough", fix)
    return value


def check_trainer_kernels(config: Config, machine: Machine) -> str:
    """Report the kernels of the trainer's operations on this machine."""
    from invrl.families.hf_config import read_hf_config

    model = read_hf_config(config.model.folder)
    kernels = Kernels.of(
        head_dim=model.smallest_head_dim,
        has_experts=model.experts is not None,
        dtype=config.train.train_dtype,
        on_cuda=machine.gpus > 0,
    )
    return str(kernels)


def check_trainer_memory(config: Config, machine: Machine) -> str:
    """Check the memory of each trainer rank. On a GPU it is compared with the GPU's
    memory; on a CPU all processes of the run are compared together (`check_memory`).
    The run measures the same (`train/peak_memory_gb`)."""
    budget = _trainer_memory(config, machine)
    if budget is None:
        return "not estimated: no model is given"
    estimate = budget.largest()
    value = str(estimate)
    if machine.gpus and machine.gpu_memory_bytes:
        available = machine.gpu_memory_bytes
        value += f", of {available / _GB:.1f} GB of a GPU"
        fix = (
            "lower --max-tokens-per-micro-batch, add --megatron-recompute-granularity full "
            "--megatron-recompute-method uniform --megatron-recompute-num-layers 1, keep the optimizer in main "
            "memory with --optimizer-cpu-offload, or divide the model with "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size"
        )
        if estimate.total > 1.3 * available:
            raise LikelyFailure(
                "train.max_tokens_per_micro_batch", value, "a step would not fit", fix
            )
        if estimate.total > 0.9 * available:
            raise CheckWarning(
                "train.max_tokens_per_micro_batch", value, "a step may not fit", fix
            )
    return value


def check_longest_row(config: Config, machine: Machine) -> str:
    """Check the memory of a step with the longest possible conversation. One that is
    longer than a micro-batch is trained alone, beyond the memory of
    `check_trainer_memory`."""
    budget = _trainer_memory(config, machine)
    if budget is None:
        return "not estimated: no model is given"
    longest = longest_conversation(config)
    full = config.train.micro_batch_tokens
    if longest <= full:
        return f"{longest} tokens, no more than a micro-batch"
    value = f"{longest} tokens: {budget.largest(longest).total / _GB:.2f} GB a rank"
    if os.environ.get("RAY_ADDRESS"):
        return value
    limit = _rank_memory(config, machine, budget)
    fitting = bisect_right(
        range(full, longest + 1), limit, key=lambda tokens: budget.largest(tokens).total
    )
    most = full + max(0, fitting - 1)
    if most < longest:
        reason = (
            f"a conversation of more than about {most} tokens may not fit into memory"
        )
        fix = (
            f"set --max-sample-tokens {most}, so that a longer one is refused while it is sampled; or divide it "
            "with --context-parallel-size"
        )
        raise CheckWarning("train.max_sample_tokens", value, reason, fix)
    return value


def _rank_memory(config: Config, machine: Machine, budget: MemoryBudget) -> float:
    """Return the bytes that a rank may use: of its GPU, or of this machine's memory
    after the needs of the rest of the run."""
    if machine.gpus:
        return 0.9 * machine.gpu_memory_bytes if machine.gpu_memory_bytes else math.inf
    margin = (1 - ray_memory.threshold()) * machine.memory_total_bytes
    spare = machine.memory_bytes - margin - _needed_memory(config, machine)
    return budget.largest().total + spare / config.num_ranks


def _trainer_memory(config: Config, machine: Machine) -> MemoryBudget | None:
    """Return the trainer's memory; None without a model that the trainer computes,
    which another check explains."""
    return trainer_memory(config, gpus=machine.gpus, gpu_bytes=machine.gpu_memory_bytes)


def _arena_on_gpu(config: Config, machine: Machine) -> bool:
    return arena_on_gpu(config, gpus=machine.gpus, gpu_bytes=machine.gpu_memory_bytes)


def _needed_memory(config: Config, machine: Machine) -> float:
    """Estimate the bytes of a run. An engine's process takes 1.5 GB and an engine its
    weights twice, a trainer rank `MemoryBudget`, the rest of the run 2 GB. One rank
    stages weights. On a GPU engines and ranks hold theirs elsewhere, and their weights
    pass through memory once. Checkpoints are copied into it, and the optimizer's state
    is there always (`--optimizer-cpu-offload`) or while engines use the GPUs."""
    weights = _weight_bytes(config)
    engines = config.engines_here
    layout = config.train.layout
    budget = _trainer_memory(config, machine)
    copies = budget.copy_bytes if budget else 0.0
    if machine.gpus:
        staged = 0 if _arena_on_gpu(config, machine) else 2 * weights
        needed = 2 * _GB + staged + weights * (engines + layout.data) + copies
        if budget and (config.train.optimizer_cpu_offload or config.run.colocate):
            needed += budget.offloaded_bytes * config.num_ranks / layout.world_size
        return needed
    processes = engines * config.engine.tp_size
    needed = 2 * _GB + processes * 1.5 * _GB + 2 * engines * weights + copies
    if budget is None:
        return needed + config.num_ranks * _GB
    ranks_of_stage = layout.world_size // layout.pipeline
    for estimate in budget.stages():
        of_each = estimate.total - estimate.staging - estimate.copy
        needed += ranks_of_stage * of_each + estimate.staging
    if config.critic_layout is not None:
        # At most what the ranks of a policy need that is trained whole and has no frozen
        # model; the projection is counted too.
        of_critic = replace(budget, adapter=None, frozen_models=0).largest()
        needed += config.critic_layout.world_size * (
            of_critic.total - of_critic.staging
        )
    return needed


def _weight_bytes(config: Config) -> int:
    """Return the bytes of the model as engines hold it; 0 without a model."""
    if not config.model.model_path:
        return 0
    stored = sum(
        file.stat().st_size for file in config.model.folder.glob("*.safetensors")
    )
    if config.engine.dtype == "float32":
        return 2 * stored
    return stored


def _checkpoint_bytes(config: Config, machine: Machine) -> float:
    """Return the bytes that a checkpoint of the run takes at least: a critic of another
    model than the policy's is not counted. Of a model that the estimate cannot read,
    eight times its files."""
    budget = _trainer_memory(config, machine)
    if budget is None:
        return 8.0 * _weight_bytes(config)
    has_critic = (
        objective_needs(config.algorithm).values
        and config.critic_folder == config.model.folder
    )
    return replace(budget, has_critic=has_critic).checkpoint_bytes


def _existing(folder: str) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def check_store_disk(config: Config, machine: Machine) -> str:
    """Check the disk of a command that writes no more than conversations and logs."""
    root = _existing(config.run.run_root)
    full = full_disk(root)
    if full:
        reason = f"a run needs {FULL_BYTES / 1e6:.0f} MB there at least"
        raise ConfigError(
            "run.run_root", full, reason, "free some, or give another --run-root"
        )
    return space_left(root)


def check_temporary_files(config: Config, machine: Machine) -> str:
    """Check the folders in which Ray, engines and user code keep temporary files."""
    fix = "free some, or set TMPDIR to a folder with space (of at most 12 characters, for Ray's sockets)"
    try:
        parents = sorted(temporary_parents())
    except FileNotFoundError as error:
        value = os.environ.get("TMPDIR", "absent")
        raise ConfigError("TMPDIR", value, str(error), fix) from error
    for parent in parents:
        full = full_disk(parent)
        if full:
            reason = (
                f"{full}; temporary files need {FULL_BYTES / 1e6:.0f} MB there at least"
            )
            raise ConfigError("TMPDIR", str(parent), reason, fix)
    return ", ".join(space_left(parent) for parent in parents)


def check_weight_disk(config: Config, machine: Machine) -> str:
    """A folder of its own for the weights on their way to the engines holds one version
    at least."""
    weights = config.weights
    if not isinstance(weights, FileWeights) or not weights.folder:
        return "none: the run folder, if weights go by disk"
    folder = _existing(weights.folder)
    free = psutil.disk_usage(str(folder)).free
    needed = _weight_bytes(config)
    value = f"{free / _GB:.1f} GB free at {folder}, {needed / _GB:.1f} GB per version"
    if free < needed:
        fix = "free some, or give another --weights.folder"
        raise ConfigError(
            "weights.folder",
            value,
            "the disk is too small for the weights",
            fix,
        )
    return value


def check_disk(config: Config, machine: Machine) -> str:
    """A run with a trainer writes one checkpoint at least. A new one is written beside
    those that are kept (no `checkpoints.keep`: every one is kept, so their number is
    not known; two are counted)."""
    if config.run.debug_rollout_only:
        return check_store_disk(config, machine)
    root = _existing(config.run.run_root)
    free = psutil.disk_usage(str(root)).free
    checkpoint = _checkpoint_bytes(config, machine)
    least = checkpoint + FULL_BYTES
    kept = config.run.checkpoints
    checkpoints = (kept.keep or 1) + (kept.keep_best or 0) + 1
    needed = checkpoints * checkpoint + _GB
    value = (
        f"{free / _GB:.1f} GB free at {root}, about {checkpoint / _GB:.1f} GB per checkpoint and "
        f"{needed / _GB:.1f} GB for {checkpoints} of them"
    )
    if free < least:
        reason = f"the disk is too small for one checkpoint: the run needs {least / _GB:.2f} GB there at least"
        fix = "free some, or give another --run-root"
        raise ConfigError("run.run_root", value, reason, fix)
    if free < needed:
        reason = "the disk may fill: a checkpoint is written beside those kept"
        fix = "free some, give another --run-root, or lower --checkpoints.keep or --checkpoints.keep-best"
        raise CheckWarning("run.run_root", value, reason, fix)
    return value


def check_shared_memory(config: Config, machine: Machine) -> str:
    """Check /dev/shm, which torch and Ray use. The weight arena is a memfd, which
    counts as memory."""
    value = f"{machine.shared_memory_bytes / _GB:.1f} GB free in /dev/shm"
    fix = "docker run --shm-size 8g"
    if machine.shared_memory_bytes < _MIN_SHARED_MEMORY:
        raise ConfigError("/dev/shm", value, "SGLang's processes need 64 MB", fix)
    if machine.shared_memory_bytes < _GB:
        raise CheckWarning(
            "/dev/shm", value, "with less than 1 GB Ray writes its objects to disk", fix
        )
    return value


def check_ray(config: Config, machine: Machine) -> str:
    """Check that something listens at RAY_ADDRESS (host:port, or ray://host:port)."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address == "auto":
        return "auto: the Ray that runs on this machine"
    if address in ("", "local"):
        return "none: the run starts its own Ray"
    url = address if "://" in address else f"ray://{address}"
    try:
        parts = urlsplit(url)
        if not parts.hostname or not parts.port:
            raise ValueError("not of the form host:port")
        socket.create_connection(
            (parts.hostname, parts.port), timeout=_RAY_DEADLINE_S
        ).close()
    except (OSError, ValueError) as error:
        fix = "start it (`ray start --head`), correct RAY_ADDRESS, or unset it"
        raise ConfigError(
            "RAY_ADDRESS", address, f"no Ray can be reached there ({error})", fix
        ) from error
    return f"{address} answers"
