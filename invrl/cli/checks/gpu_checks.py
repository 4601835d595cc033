"""A run's requirements on GPUs: one function per check, as in `machine_checks.py`."""

import contextlib
import os
from collections.abc import Callable, Mapping

import psutil

from invrl.cli.checks.check_warnings import CheckWarning, LikelyFailure
from invrl.cli.checks.machine import Machine
from invrl.cli.installation import install_command
from invrl.errors import ConfigError
from invrl.host.gpus import VISIBLE_VARIABLE, Gpu, GpuProcess
from invrl.run.processes.gpu_plan import GpuPlan, plan_engines, plan_run
from invrl.run.processes.trainer_memory import DividedGpu, with_divided_memory
from invrl.run.settings.config import Config

_IDLE_BYTES = 2 << 30
"""Memory of a GPU that a screen and the driver may use."""
_NO_GPU = "none: everything is on the CPU"


def check_gpu(config: Config, machine: Machine) -> str:
    """Check that torch can use the GPUs of this machine."""
    cuda = machine.cuda
    setting = os.environ.get(VISIBLE_VARIABLE)
    if machine.gpus:
        if cuda is not None and cuda.driver_is_too_old and cuda.torch is not None:
            value = f"a driver for CUDA {_version(cuda.driver)}"
            reason = f"torch {machine.torch} is built for CUDA {_version(cuda.torch)}, and cannot use it"
            fix = f"install a driver for CUDA {cuda.torch[0]} or later; CUDA itself comes with torch"
            raise ConfigError("gpu", value, reason, fix)
        text = f"{machine.gpus} GPUs" if machine.gpus > 1 else "1 GPU"
        if machine.cards:
            text += f": {', '.join(str(card) for card in machine.cards)}"
        return text if setting is None else f"{text} ({VISIBLE_VARIABLE}={setting})"
    if machine.nvidia:
        reason = (
            f"an NVIDIA driver is loaded, but torch {machine.torch} cannot use a GPU"
        )
        fix = f"run: {install_command(gpu=True)}"
        if setting is not None:
            reason += f"; {VISIBLE_VARIABLE} is {setting!r}"
            fix += f"; or unset {VISIBLE_VARIABLE}"
        raise CheckWarning("gpu", "CPU", reason, fix)
    return f"none: CPU, torch {machine.torch}"


def check_plan_of_run(config: Config, machine: Machine) -> str:
    """Check that there are GPUs for the trainer's ranks and the engines."""
    return str(plan_run(config, machine.gpus) or _NO_GPU)


def check_plan_of_engines(config: Config, machine: Machine) -> str:
    """Check that there are GPUs for the engines of a command that does not train."""
    return str(plan_engines(config, machine.gpus) or _NO_GPU)


def check_divided_gpu(config: Config, machine: Machine) -> str:
    """Check that the only GPU has memory for the trainer and an engine together."""
    plan = plan_run(config, machine.gpus)
    total = machine.gpu_memory_bytes
    if plan is None or not total:
        return _NO_GPU
    divided = with_divided_memory(config, plan, gpu_bytes=total)
    if divided is not config:
        return f"the engine's cache has {divided.engine.max_total_tokens} tokens"
    wanted = config.engine.max_total_tokens
    if not plan.shares or config.run.colocate or wanted is None:
        return "no GPU is divided"
    parts = DividedGpu.of(config, gpu_bytes=total)
    if parts is not None and wanted > parts.cache_tokens:
        reason = f"besides the trainer the GPU has memory for about {parts.cache_tokens} tokens"
        raise CheckWarning(
            "engine.max_total_tokens", wanted, reason, "lower it, or leave it out"
        )
    return f"the engine's cache has {wanted} tokens"


def check_kinds(config: Config, machine: Machine) -> str:
    """Check that the GPUs of the run are whole cards of one kind."""
    cards = _planned_cards(plan_run, config, machine)
    kinds = sorted({str(card) for card in cards.values()})
    if any(card.is_mig for card in cards.values()):
        reason = "a part of a card (MIG) was never tried, and CUDA shows a process only one of them"
        fix = "give the run a whole card, if it does not start"
        raise CheckWarning("gpu", ", ".join(kinds), reason, fix)
    if len(kinds) > 1:
        reason = "ranks and engines wait for the slowest card, and what fits is what fits on the smallest"
        fix = f"choose equal cards with {VISIBLE_VARIABLE}"
        raise CheckWarning("gpu", ", ".join(kinds), reason, fix)
    return kinds[0] if kinds else _NO_GPU


def check_use_by_others(config: Config, machine: Machine) -> str:
    """Check that nobody else uses the GPUs of a run that trains."""
    return _use_by_others(_planned_cards(plan_run, config, machine))


def check_engines_use_by_others(config: Config, machine: Machine) -> str:
    """Check that nobody else uses the GPUs of engines without a trainer."""
    return _use_by_others(_planned_cards(plan_engines, config, machine))


def _use_by_others(cards: Mapping[int, Gpu]) -> str:
    busy = {
        number: card for number, card in cards.items() if card.used_bytes > _IDLE_BYTES
    }
    if not busy:
        return "nobody else uses it" if cards else _NO_GPU
    value = "; ".join(
        f"GPU {number}: {card.used_bytes / 1e9:.1f} of {card.memory_bytes / 1e9:.1f} GB in use"
        for number, card in busy.items()
    )
    holders = [
        _described(process) for card in busy.values() for process in card.processes
    ]
    reason = "the run may find too little memory; "
    if holders:
        reason += f"it is used by {', '.join(holders)}"
    else:
        reason += "nvidia-smi shows no process, as for one of another container"
    fix = f"end what uses it, or choose other GPUs with {VISIBLE_VARIABLE}"
    raise LikelyFailure("gpu memory", value, reason, fix)


def check_nvcc(config: Config, machine: Machine) -> str:
    """Check that SGLang can compile the kernels that it builds on their first use."""
    if not machine.gpus or machine.cuda is None or not config.engines_here:
        return _NO_GPU
    if machine.cuda.nvcc is None:
        reason = (
            "SGLang compiles some kernels when an engine first uses them; without it an engine does without "
            "some of them and ends where it needs one"
        )
        fix = "install NVIDIA's CUDA toolkit, or set CUDA_HOME to the folder of one"
        raise CheckWarning("nvcc", "absent", reason, fix)
    return str(machine.cuda.nvcc)


def _planned_cards(
    plan: Callable[[Config, int], GpuPlan | None], config: Config, machine: Machine
) -> dict[int, Gpu]:
    """Return the described GPUs of the plan by number; none if there is no plan, which
    another check explains."""
    try:
        gpus = plan(config, machine.gpus)
    except ConfigError:
        return {}
    if gpus is None or len(machine.cards) < machine.gpus:
        return {}
    return {number: machine.cards[number] for number in gpus.numbers}


def _described(process: GpuProcess) -> str:
    """Describe the process, and say if it belongs to another run of invrl."""
    with contextlib.suppress(psutil.Error):
        command = " ".join(psutil.Process(process.pid).cmdline())
        if "invrl" in command or "ray::" in command:
            return f"{process}, which may belong to another run"
    return str(process)


def _version(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
