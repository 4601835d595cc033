"""The GPUs of a machine: what is made of CUDA's answers and of nvidia-smi's rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from invrl.host.gpus import (
    CudaSoftware,
    Gpu,
    GpuProcess,
    cuda_in_text,
    described_gpus,
    find_nvcc,
    own_gpu_first,
    visible_gpus,
)

H100 = Gpu(memory_bytes=80 * 10**9, uuid="GPU-a", name="NVIDIA H100")


def test_gpus_are_described_in_the_order_of_cuda() -> None:
    other = Gpu(memory_bytes=24 * 10**9, uuid="GPU-b", name="NVIDIA L4")
    cards = [
        ["GPU-b", "NVIDIA L4", "3", "[N/A]"],
        ["GPU-hidden", "NVIDIA H100", "70000", "Disabled"],
        ["GPU-a", "NVIDIA H100", "5000", "Disabled"],
    ]
    processes = [["GPU-a", "77", "python3", "4990"], ["GPU-hidden", "9", "x", "1"]]
    first, second = described_gpus([H100, other], cards=cards, processes=processes)
    assert first.used_bytes == 5000 * 2**20
    assert first.processes == (
        GpuProcess(pid=77, name="python3", memory_bytes=4990 * 2**20),
    )
    assert second.name == "NVIDIA L4"
    assert second.processes == ()
    assert not first.is_mig


def test_gpu_is_described_without_nvidia_smi() -> None:
    assert described_gpus([H100], cards=[], processes=[]) == (H100,)


def test_gpu_unknown_to_nvidia_smi_is_a_part_of_a_divided_card() -> None:
    slice_of_card = Gpu(memory_bytes=10 * 10**9, uuid="MIG-1", name="NVIDIA H100 MIG")
    cards = [["GPU-a", "NVIDIA H100", "0", "Enabled"]]
    [gpu] = described_gpus([slice_of_card], cards=cards, processes=[])
    assert gpu.is_mig
    assert str(gpu) == "part of a NVIDIA H100 MIG (10 GB)"


def test_memory_that_the_driver_does_not_say_is_absent() -> None:
    cards = [["GPU-a", "NVIDIA H100", "[N/A]", "Disabled"]]
    processes = [["GPU-a", "77", "python3", "[N/A]"]]
    [gpu] = described_gpus([H100], cards=cards, processes=processes)
    assert gpu.used_bytes == 0
    assert str(gpu.processes[0]) == "pid 77 (python3)"


@pytest.mark.parametrize(
    ("setting", "number", "names"),
    [
        (None, 2, "2,0,1"),
        (None, 0, "0,1,2"),
        ("4,5,6", 1, "5,4,6"),
        ("GPU-x, GPU-y,GPU-z", 2, "GPU-z,GPU-x,GPU-y"),
        ("4,5,6,-1,7", 0, "4,5,6"),
    ],
)
def test_a_process_is_shown_its_own_gpu_before_the_others_of_the_user(
    setting: str | None, number: int, names: str
) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert own_gpu_first(number, 3, environment) == names


def test_cuda_of_torch_is_read_from_its_version_file() -> None:
    line = "__version__ = '2.13.0'\ncuda: Optional[str] = {}\n"
    assert cuda_in_text(line.format("'13.0'")) == (13, 0)
    assert cuda_in_text(line.format("None")) is None


def test_driver_serves_every_minor_version_of_its_major_one() -> None:
    def too_old(driver: tuple[int, int], torch: tuple[int, int] | None) -> bool:
        software = CudaSoftware(driver=driver, torch=torch, nvcc=None)
        return software.driver_is_too_old

    assert too_old((12, 8), (13, 0))
    assert not too_old((13, 0), (13, 1))
    assert not too_old((14, 0), (13, 0))
    assert not too_old((12, 8), None)


def test_nvcc_is_found_where_sglang_looks(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert find_nvcc({"CUDA_HOME": str(tmp_path)}) == nvcc
    assert find_nvcc({"CUDA_PATH": str(tmp_path)}) == nvcc
    assert find_nvcc({"PATH": f"/none{os.pathsep}{nvcc.parent}"}) == nvcc
    both = {"CUDA_HOME": str(tmp_path / "none"), "PATH": str(nvcc.parent)}
    assert find_nvcc(both) is None, "CUDA_HOME wins, as in SGLang"


def test_gpus_are_read_from_the_driver_and_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 1
            return 0

        def cuDeviceGet(self, device: Any, number: int) -> int:
            return 0

        def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
            name.value = b"NVIDIA L4"
            return 0

        def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
            size._obj.value = 24 * 10**9
            return 0

        def cuDeviceGetUuid_v2(self, identity: Any, device: Any) -> int:
            identity.raw = bytes(range(16))
            return 0

    uuid = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        f'--query-gpu=*) echo "{uuid}, NVIDIA L4, 7, [N/A]";;\n'
        f'*) echo "{uuid}, 42, python, 5";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("invrl.host.gpus.ctypes.CDLL", lambda name: Driver())
    [gpu] = visible_gpus()
    assert gpu == Gpu(
        memory_bytes=24 * 10**9,
        uuid=uuid,
        name="NVIDIA L4",
        used_bytes=7 * 2**20,
        processes=(GpuProcess(pid=42, name="python", memory_bytes=5 * 2**20),),
    )


def test_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(name)

    monkeypatch.setattr("invrl.host.gpus.ctypes.CDLL", missing)
    assert visible_gpus() == ()
