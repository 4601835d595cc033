"""Facts about a machine for its checks."""

import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from invrl.host.gpus import CudaSoftware, Gpu, cuda_software, visible_gpus

_SHARED_MEMORY = Path("/dev/shm")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A plain value, so that a test can describe any machine."""

    python: tuple[int, int]
    cpus: int
    gpus: int
    """GPUs that torch can use."""
    gpu_memory_bytes: int = 0
    """Memory of the smallest GPU; 0 without one."""
    cards: tuple[Gpu, ...] = ()
    """The same GPUs, described."""
    cuda: CudaSoftware | None = None
    """None without a driver."""
    nvidia: bool
    """Whether a driver is loaded, even if the installed torch cannot use it."""
    is_slow_in_bfloat16: bool = False
    """Whether its CPU is an x86 one without AVX-512, for which oneDNN has no bfloat16
    kernels."""
    torch: str
    """Version of torch."""
    memory_bytes: int
    """Free bytes now."""
    memory_total_bytes: int
    shared_memory_bytes: int
    """Free bytes now."""


def inspect_machine() -> Machine:
    """Describe this machine. A container's limit also bounds the memory."""
    from invrl.engines.launch.engine_server import count_gpus, smallest_gpu_bytes

    memory_free, memory_total = container_memory(_CONTROL_GROUP)
    shared_memory = 0
    if _SHARED_MEMORY.is_dir():
        shared_memory = psutil.disk_usage(str(_SHARED_MEMORY)).free
    return Machine(
        python=sys.version_info[:2],
        cpus=len(os.sched_getaffinity(0)),
        gpus=count_gpus(),
        gpu_memory_bytes=smallest_gpu_bytes(),
        cards=visible_gpus(),
        cuda=cuda_software(),
        nvidia=has_nvidia_driver(),
        is_slow_in_bfloat16=lacks_avx512(),
        torch=installed_version("torch") or "(none)",
        memory_bytes=memory_free,
        memory_total_bytes=memory_total,
        shared_memory_bytes=shared_memory,
    )


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def lacks_avx512() -> bool:
    """Whether the processor is many times slower in bfloat16 than in float32. False for
    processors other than x86."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    flags = [line for line in lines if line.startswith("flags")]
    return bool(flags) and "avx512f" not in flags[0].split()


def container_memory(control_group: Path) -> tuple[int, int]:
    """Return the free bytes and all bytes of the container whose control group (version
    2) is this folder, or of the machine if that sets no limit.

    Files that the kernel keeps in memory count as free, as they do for Ray: the kernel
    drops them when the container needs more, and a container that has just read a large
    model is full of them.
    """
    memory = psutil.virtual_memory()
    limit_file = control_group / "memory.max"
    if not limit_file.is_file():
        return memory.available, memory.total
    text = limit_file.read_text(encoding="utf-8").strip()
    if text == "max":
        return memory.available, memory.total
    limit = int(text)
    used = int((control_group / "memory.current").read_text(encoding="utf-8"))
    lines = (control_group / "memory.stat").read_text(encoding="utf-8").splitlines()
    stat = dict(line.split() for line in lines)
    cached_files = int(stat["inactive_file"]) + int(stat["active_file"])
    return min(memory.available, limit - used + cached_files), min(memory.total, limit)


def installed_version(package: str) -> str:
    """Return the package's version; empty if it is not installed."""
    for distribution in importlib.metadata.distributions(name=package):
        return distribution.version
    return ""
