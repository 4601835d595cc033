"""A training step: its memory next to our own estimate, where its time goes, and its
speed next to plain Hugging Face's. The profile is `profile-16k.txt` in the folder for
results.

A process has one trainer rank, so the smaller micro-batch is measured in a process of
its own.
"""

import gc
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.training.step_program import StepSettings, measure_rank, start_rank
from benchmarks.training.workloads import make_batch
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings
from gpu_check.step_profile import profile_step
from invrl.algorithms.config import AlgorithmConfig
from invrl.families.hf_config import read_hf_config
from invrl.train.batches.sharding import Shard, shard_batch
from invrl.train.config import TrainConfig
from invrl.train.cost.memory_budget import MemoryBudget
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.metrics import resolve

MICRO_BATCHES = (4096, 16_384)
"""Tokens. The larger one is profiled."""
_SMOKE_MICRO_BATCHES = (64, 128)
_STEP_MICRO_BATCHES = 4
_REPETITIONS = 2
_DEADLINE_S = 100.0


def run(settings: CheckSettings) -> None:
    small, large = _SMOKE_MICRO_BATCHES if settings.smoke else MICRO_BATCHES
    steps = _step_settings(settings, large)
    rank = start_rank(steps.model_path, steps.train, AlgorithmConfig.model_validate({}))
    out_of_memory: torch.OutOfMemoryError | None = None
    try:
        _profile(settings, rank, large)
        emit(**_speeds(large, measure_rank(rank, steps)))
    except torch.OutOfMemoryError as error:
        # Without its traceback, which holds what the step has allocated.
        out_of_memory = error.with_traceback(None)
        emit(
            micro_batch=large,
            out_of_memory=str(error),
            would_fit=_largest_micro_batch(steps),
        )
    del rank
    gc.collect()
    if not settings.smoke:
        torch.cuda.empty_cache()
    of_small = replace(_step_settings(settings, small), workloads=("equal_lengths",))
    emit(**_speeds(small, _measure_in_process(of_small)))
    if out_of_memory is not None:
        raise out_of_memory


def _step_settings(settings: CheckSettings, micro_batch: int) -> StepSettings:
    return StepSettings(
        model_path=str(random_model(settings, settings.model)),
        train=TrainConfig.model_validate({"max_tokens_per_micro_batch": micro_batch}),
        num_tokens=_STEP_MICRO_BATCHES * micro_batch,
        repetitions=_REPETITIONS,
        out=str(settings.out / f"speed-{micro_batch}.json"),
    )


def _largest_micro_batch(steps: StepSettings) -> int:
    """Tokens of the largest one, of powers of two, with which our own estimate is below
    the card's memory."""
    budget = MemoryBudget.of(
        steps.train,
        Path(steps.model_path),
        frozen_models=0,
        served_dtype=steps.train.train_dtype,
        megatron={},
        copies_checkpoints=False,
        on_cuda=True,
    )
    _, total = torch.cuda.mem_get_info()
    num_tokens = steps.train.micro_batch_tokens
    while num_tokens > 1 and budget.largest(num_tokens).total > total:
        num_tokens //= 2
    return num_tokens


def _profile(settings: CheckSettings, rank: TrainRank, micro_batch: int) -> None:
    """Of a step of one full micro-batch, when all is compiled. The memory is that of
    two such steps: torch counts from the start of the process."""
    shard = _shard(settings, micro_batch)
    rank.train(shard)
    result = rank.train(shard)
    values = resolve(result.metrics)
    emit(
        micro_batch=micro_batch,
        peak_memory_gb=values["peak_memory_gb"],
        estimated_memory_gb=values["estimated_memory_gb"],
        largest_micro_batch=values["largest_micro_batch"],
        step_phases_s=dict(result.seconds),
    )
    name = "profile-smoke.txt" if settings.smoke else "profile-16k.txt"
    profile = profile_step(lambda: rank.train(shard), settings.out / name)
    emit(profile=name, **asdict(profile))


def _shard(settings: CheckSettings, num_tokens: int) -> Shard:
    model = random_model(settings, settings.model)
    batch = make_batch(
        "equal_lengths",
        num_tokens=num_tokens,
        longest=num_tokens,
        vocab_size=read_hf_config(model).vocab_size,
    )
    [shard] = shard_batch(batch, ranks=1, steps=1)
    return shard


def _measure_in_process(steps: StepSettings) -> dict[str, Any]:
    settings_json = TypeAdapter(StepSettings).dump_json(steps)
    command = [sys.executable, "-m", "benchmarks.training.step_program"]
    subprocess.run(command, input=settings_json, check=True, timeout=_DEADLINE_S)
    return json.loads(Path(steps.out).read_text(encoding="utf-8"))


def _speeds(micro_batch: int, measured: dict[str, Any]) -> dict[str, object]:
    """With the share of the card's speed at multiplying matrices that the step makes
    use of."""
    most = measured["matmul_operations_per_s"]
    used = [operations / most for operations in measured["operations_per_s"]]
    return {"micro_batch": micro_batch, **measured, "model_flops_utilisation": used}
