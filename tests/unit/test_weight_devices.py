"""Where the weight arena is: in the memory of the one GPU that trainer and engines
share, if it has room."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

from invrl.cli.flags import parse_flags
from invrl.engines.launch import engine_server
from invrl.families.hf_config import read_hf_config
from invrl.run.processes.gpu_plan import plan_run
from invrl.run.processes.weight_devices import arena_on_gpu, broadcast_on_gpu
from invrl.run.settings.config import Config, resolve
from invrl.train.config import TrainConfig
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.cost.model_size import ModelSize

H100_BYTES = 80 * 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


def configured(model: Path, *flags: str) -> Config:
    required = ["--model-path", str(model), "--rollout-function-path", "agent:rollout"]
    return resolve(*parse_flags([*required, *flags]))


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        ([], 1, True),
        ([], 0, False),
        ([], 2, False),
        (["--weights.arena-device", "cpu"], 1, False),
        (["--weights.arena-device", "cuda"], 2, True),
        (["--weights.arena-mode", "alias"], 1, False),
        (["--weights.transport", "bucket"], 1, False),
        (["--engine.tp-size", "2"], 1, True),
    ],
)
def test_arena_is_on_the_gpu_shared_by_trainer_and_engine_unless_set_otherwise(
    model: Path, flags: list[str], gpus: int, expected: bool
) -> None:
    assert (
        arena_on_gpu(configured(model, *flags), gpus=gpus, gpu_bytes=H100_BYTES)
        is expected
    )


def test_arena_on_a_gpu_takes_at_most_an_eighth_of_its_memory(model: Path) -> None:
    size = ModelSize.of(model, read_hf_config(model)).total
    for dtype, item in (("bfloat16", 2), ("float32", 4)):
        config = configured(model, "--engine.dtype", dtype)
        room = 8 * 2 * item * size
        assert arena_on_gpu(config, gpus=1, gpu_bytes=room)
        assert not arena_on_gpu(config, gpus=1, gpu_bytes=room - 1)


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        (["--weights.transport", "collective"], 2, True),
        (["--weights.transport", "collective"], 1, False),
        (["--weights.transport", "collective"], 0, False),
        (["--weights.transport", "collective", "--colocate"], 2, False),
        (
            "--weights.transport collective --weights.host 10.0.0.1 --external-engines http://10.0.0.2:30000".split(),
            4,
            False,
        ),
        ([], 2, False),
    ],
)
def test_broadcast_goes_between_gpus_if_trainer_and_engines_share_none(
    model: Path, flags: list[str], gpus: int, expected: bool
) -> None:
    config = configured(model, *flags)
    assert broadcast_on_gpu(config, plan_run(config, gpus)) is expected


def test_memory_estimate_counts_arena_slots_on_their_device(model: Path) -> None:
    size = ModelSize.of(model, read_hf_config(model)).total
    on_cpu = MemoryBudget.of(
        TrainConfig(),
        model,
        frozen_models=0,
        served_dtype="bfloat16",
        megatron={},
        copies_checkpoints=False,
        on_cuda=False,
    )
    for on_cuda, in_gpu, slots in (
        (False, False, 2),
        (True, False, 0),
        (True, True, 2),
    ):
        budget = replace(on_cpu, on_cuda=on_cuda, arena_on_gpu=in_gpu)
        assert budget.largest().staging == slots * 2 * size


def test_memory_of_the_smallest_gpu_is_read_without_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = [80 << 30, 40 << 30]

    class Driver:
        def cuDeviceGet(self, device, index) -> int:
            device._obj.value = index
            return 0

        def cuDeviceTotalMem_v2(self, size, device) -> int:
            size._obj.value = sizes[device.value]
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    for count, expected in ((2, 40 << 30), (1, 80 << 30), (0, 0)):
        monkeypatch.setattr(engine_server, "count_gpus", lambda count=count: count)
        assert engine_server.smallest_gpu_bytes() == expected
