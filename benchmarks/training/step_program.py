"""`python -m benchmarks.training.step_program`: our training step beside a plain
Hugging Face one, on the same rows, in one process of one thread. Settings come as JSON
on the standard input, the result goes as JSON to a file.

On a CPU speeds are row tokens per CPU-second, padding not counted, so that other
processes of the machine disturb them less; on a GPU per second. Both steps have the
malloc settings of `device.prepare`, without which Hugging Face's is slower. Neither has
more than one process.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter

from benchmarks.training.hugging_face_step import (
    HuggingFaceStep,
    PaddedBatch,
    pad_batch,
)
from benchmarks.training.workloads import WORKLOADS, make_batch
from invrl.algorithms.config import AlgorithmConfig
from invrl.families.hf_config import read_hf_config
from invrl.host.network.rendezvous import listen
from invrl.host.processes.process import random_key
from invrl.train.batches.sharding import Shard, shard_batch
from invrl.train.config import TrainConfig
from invrl.train.cost.model_size import ComputeCost
from invrl.train.parallel_layout import ParallelLayout
from invrl.train.rank_settings import RankSettings
from invrl.train.runtime import device
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.batches import TrainBatch

_MATMUL_ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    model_path: str
    train: TrainConfig
    num_tokens: int
    """Of a step."""
    repetitions: int
    out: str
    """File for the result."""
    workloads: tuple[str, ...] = WORKLOADS


def measure(settings: StepSettings) -> dict[str, object]:
    """As `measure_rank`, with a rank that is started for it."""
    rank = start_rank(
        settings.model_path, settings.train, AlgorithmConfig.model_validate({})
    )
    return measure_rank(rank, settings)


def measure_rank(rank: TrainRank, settings: StepSettings) -> dict[str, object]:
    """Speeds by workload, the seconds of our steps by phase, and the rate of
    floating-point operations. `rank` was started with the model and the settings of
    training that `settings` has."""
    plain = HuggingFaceStep(
        settings.model_path, settings.train, AlgorithmConfig.model_validate({})
    )
    cost = ComputeCost.of_model(Path(settings.model_path))
    vocab_size = read_hf_config(settings.model_path).vocab_size
    speeds: dict[str, dict[str, list[float]]] = {}
    phases: list[dict[str, float]] = []
    flops: list[float] = []
    for workload in settings.workloads:
        batch = make_batch(
            workload,
            num_tokens=settings.num_tokens,
            longest=settings.train.micro_batch_tokens,
            vocab_size=vocab_size,
        )
        [shard] = shard_batch(batch, ranks=1, steps=1)

        def ours(shard: Shard = shard) -> None:
            started = time.monotonic()
            result = rank.train(shard)
            phases.append({**result.seconds, "total": time.monotonic() - started})

        padded = _padded_batches(workload, batch, settings.train.micro_batch_tokens)
        steps = {
            "trainer": ours,
            **{name: partial(plain.run, rows) for name, rows in padded.items()},
        }
        measured = measure_steps(steps, batch, settings.repetitions)
        for name in padded:
            speeds[name] = {"ours": measured["trainer"], "reference": measured[name]}
        if workload == "equal_lengths":
            work = 3 * _forward_operations(batch, cost)
            tokens = sum(len(sample.tokens_T) for sample in batch.samples)
            flops = [work * speed / tokens for speed in measured["trainer"]]
    return {
        "speeds": speeds,
        "phases": phases[-settings.repetitions :],
        "operations_per_s": flops,
        "matmul_operations_per_s": _matmul_rate(
            getattr(torch, settings.train.train_dtype)
        ),
    }


def _padded_batches(
    workload: str, batch: TrainBatch, tokens: int
) -> dict[str, PaddedBatch]:
    """What the plain step trains, by the name of the ratio. Unequal rows come as they
    are in the batch, and once more sorted by length, which costs a plain loop its order
    but saves it padding."""
    padded = {workload: pad_batch(batch, tokens=tokens, sorted_by_length=False)}
    if workload == "long_tailed":
        padded["long_tailed_sorted"] = pad_batch(
            batch, tokens=tokens, sorted_by_length=True
        )
    return padded


def start_rank(
    model_path: str, train: TrainConfig, algorithm: AlgorithmConfig
) -> TrainRank:
    """A trainer of one rank in this process."""
    settings = RankSettings(
        rank=0,
        layout=ParallelLayout(),
        master_addr="127.0.0.1",
        store_key=random_key(),
        model_path=model_path,
        train=train,
        algorithm=algorithm,
        weight_dtype=train.train_dtype,
        host_threads=len(os.sched_getaffinity(0)),
    )
    listener = listen(settings.master_addr)
    return TrainRank(settings, listener.getsockname()[1], listener)


def measure_steps(
    steps: Mapping[str, Callable[[], object]], batch: TrainBatch, repetitions: int
) -> dict[str, list[float]]:
    """Tokens per second of each step, in turns; the first round is not counted. What a
    step returns is not looked at: `same_step.py` proves that they are the same."""
    tokens = sum(len(sample.tokens_T) for sample in batch.samples)
    speeds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(repetitions + 1):
        for name, step in steps.items():
            started = _seconds()
            step()
            if round_number:
                speeds[name].append(tokens / (_seconds() - started))
    return speeds


def _seconds() -> float:
    if device.on_cuda():
        torch.cuda.synchronize()
        return time.monotonic()
    return time.process_time()


def _forward_operations(batch: TrainBatch, cost: ComputeCost) -> float:
    """Of rows without shared prefixes. The last token of each is only predicted."""
    operations = 0.0
    for sample in batch.samples:
        operations += cost.tokens(0, len(sample.tokens_T) - 1)
        operations += cost.projection * int(sample.loss_mask_T.sum())
    return operations


def _matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of large square matrices, at
    best.

    The second one is transposed, as a layer's weight is: a CPU without bfloat16
    instructions multiplies it ten times as fast.
    """
    size = 8192 if device.on_cuda() else 1024
    a = torch.randn(size, size, device=device.device()).to(dtype)
    best = 0.0
    for _ in range(_MATMUL_ROUNDS):
        started = _seconds()
        torch.mm(a, a.T)
        best = max(best, 2.0 * size**3 / (_seconds() - started))
    return best


if __name__ == "__main__":
    torch.set_num_threads(1)
    step_settings = TypeAdapter(StepSettings).validate_json(sys.stdin.read())
    Path(step_settings.out).write_text(
        json.dumps(measure(step_settings)), encoding="utf-8"
    )
