"""The GPUs of this machine: as CUDA numbers them for this process, and as `nvidia-smi`
describes them.

CUDA_VISIBLE_DEVICES of the user holds: CUDA shows no other GPUs, and their numbers
begin at 0 here. Imports no torch, because that takes seconds. The functions that read
the machine are apart from those that interpret it, so that tests can describe any card.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SMI_DEADLINE_S = 20.0
_MIB = 1 << 20
_CARD_FIELDS = ("uuid", "name", "memory.used", "mig.mode.current")
_PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*= *'(\d+)\.(\d+)", re.MULTILINE)
CudaVersion = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that has memory of a GPU."""

    pid: int
    name: str
    memory_bytes: int | None = None
    """None: the driver does not say."""

    def __str__(self) -> str:
        if self.memory_bytes is None:
            return f"pid {self.pid} ({self.name})"
        return f"pid {self.pid} ({self.name}, {self.memory_bytes / 1e9:.1f} GB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU that CUDA shows to this process. A plain value, so that a test can describe
    any."""

    memory_bytes: int
    uuid: str = ""
    name: str = "GPU"
    used_bytes: int = 0
    is_mig: bool = False
    """Whether it is a part of a card (MIG)."""
    processes: tuple[GpuProcess, ...] = ()
    """Those that `nvidia-smi` shows. A container hides those of others."""

    def __str__(self) -> str:
        part = "part of a " if self.is_mig else ""
        return f"{part}{self.name} ({self.memory_bytes / 1e9:.0f} GB)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSoftware:
    """Versions of CUDA on this machine, and its compiler."""

    driver: CudaVersion
    """The newest CUDA that the driver knows."""
    torch: CudaVersion | None
    """The CUDA that torch was built for. None: it is a build for CPUs."""
    nvcc: Path | None
    """The compiler that SGLang would use. None: there is none."""

    @property
    def driver_is_too_old(self) -> bool:
        """Whether torch cannot use the driver. A driver serves every minor version of
        its major one."""
        return self.torch is not None and self.driver[0] < self.torch[0]


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows to this process, in its order."""
    driver = _load_driver()
    if driver is None:
        return ()
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    shown = [_read_device(driver, number) for number in range(count.value)]
    return described_gpus(
        shown,
        cards=_query_smi("gpu", _CARD_FIELDS),
        processes=_query_smi("compute-apps", _PROCESS_FIELDS),
    )


def described_gpus(
    shown: Sequence[Gpu],
    *,
    cards: Sequence[Sequence[str]],
    processes: Sequence[Sequence[str]],
) -> tuple[Gpu, ...]:
    """Add to the GPUs that CUDA shows what `nvidia-smi` says in its rows of cards and
    of processes. It does not list parts of a card: a GPU that it does not know is one
    if a card is divided."""
    rows = {row[0]: row for row in cards}
    divided = [row for row in cards if row[3] == "Enabled"]
    gpus: list[Gpu] = []
    for gpu in shown:
        row = rows.get(gpu.uuid)
        gpus.append(
            Gpu(
                memory_bytes=gpu.memory_bytes,
                uuid=gpu.uuid,
                name=gpu.name,
                used_bytes=(_mib(row[2]) or 0) if row else 0,
                is_mig=row is None and bool(divided),
                processes=tuple(
                    GpuProcess(pid=int(pid), name=name, memory_bytes=_mib(memory))
                    for card, pid, name, memory in processes
                    if card == gpu.uuid
                ),
            )
        )
    return tuple(gpus)


def cuda_software() -> CudaSoftware | None:
    """Return the versions of CUDA; None without a driver."""
    driver = _load_driver()
    if driver is None:
        return None
    number = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    return CudaSoftware(
        driver=(number.value // 1000, number.value % 1000 // 10),
        torch=_cuda_of_torch(),
        nvcc=find_nvcc(os.environ),
    )


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """Return the compiler that SGLang's kernels are built with, by the rule of SGLang
    0.5.21: CUDA_HOME or CUDA_PATH, else the one on PATH, else /usr/local/cuda."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environment.get("PATH", ""))
    if home is None and on_path is not None:
        return Path(on_path)
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return nvcc if os.access(nvcc, os.X_OK) else None


def own_gpu_first(number: int, num_gpus: int, environment: Mapping[str, str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES that shows a process all `num_gpus` GPUs
    of this process, and first the one that this process has under `number`. It is GPU 0
    in every thread of that process, and the others can be opened by CUDA IPC."""
    names = [str(gpu) for gpu in range(num_gpus)]
    setting = environment.get(VISIBLE_VARIABLE)
    if setting is not None:
        names = [name.strip() for name in setting.split(",")][:num_gpus]
    own = names.pop(number)
    return ",".join([own, *names])


def cuda_in_text(version_module: str) -> CudaVersion | None:
    """Return the version of CUDA that the text of `torch/version.py` has."""
    match = _TORCH_CUDA.search(version_module)
    return (int(match[1]), int(match[2])) if match else None


def _cuda_of_torch() -> CudaVersion | None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    return cuda_in_text(file.read_text(encoding="utf-8"))


def _load_driver() -> ctypes.CDLL | None:
    """Return CUDA's driver library, initialised; None if it is not there or sees no
    GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def _read_device(driver: ctypes.CDLL, number: int) -> Gpu:
    device = ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), number)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    size = ctypes.c_size_t(0)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    identity = ctypes.create_string_buffer(16)
    driver.cuDeviceGetUuid_v2(identity, device)
    return Gpu(
        memory_bytes=size.value,
        uuid=f"GPU-{uuid.UUID(bytes=identity.raw)}",
        name=name.value.decode(errors="replace"),
    )


def _query_smi(section: str, fields: Sequence[str]) -> list[list[str]]:
    """Return the rows of `nvidia-smi`; none if it does not answer."""
    command = [
        "nvidia-smi",
        f"--query-{section}={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            timeout=_SMI_DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in process.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _mib(text: str) -> int | None:
    """Return the bytes of a number of MiB; None for a word in its place, such as
    [N/A]."""
    return int(text) * _MIB if text.isdigit() else None
