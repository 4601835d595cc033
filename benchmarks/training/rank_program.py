"""`python -m benchmarks.training.rank_program`: one rank of a layout that trains a
batch some times. Settings come as JSON on the standard input, the result goes as JSON
to a file."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from benchmarks.training.workloads import make_batch
from invrl.algorithms.config import AlgorithmConfig
from invrl.families.hf_config import read_hf_config
from invrl.host.network.rendezvous import listen
from invrl.train.batches.sharding import shard_batch
from invrl.train.config import TrainConfig
from invrl.train.rank_settings import RankSettings
from invrl.train.trainer.train_rank import TrainRank
from invrl.types.metrics import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSettings:
    """The same for all ranks but for `rank`."""

    rank: int
    train: TrainConfig
    """Its sizes are the layout."""
    threads: int
    model_path: str
    workload: str
    num_tokens: int
    repetitions: int
    port_file: str
    """Where the first rank writes its port."""
    store_key: str
    deadline_s: float
    out: str
    """File for the result."""


def measure(settings: LayoutSettings) -> dict[str, object]:
    """Seconds of each step but the first, and the rank's memory, as estimated and as
    measured."""
    listener = None
    if settings.rank == 0:
        listener = listen("127.0.0.1")
        partial = Path(settings.port_file + ".partial")
        partial.write_text(str(listener.getsockname()[1]), encoding="utf-8")
        partial.replace(settings.port_file)
    layout = settings.train.layout
    rank_settings = RankSettings(
        rank=settings.rank,
        layout=layout,
        master_addr="127.0.0.1",
        store_key=settings.store_key,
        model_path=settings.model_path,
        train=settings.train,
        algorithm=AlgorithmConfig.model_validate({}),
        weight_dtype=settings.train.train_dtype,
    )
    rank = TrainRank(rank_settings, _port(settings), listener)
    batch = make_batch(
        settings.workload,
        num_tokens=settings.num_tokens,
        longest=settings.train.micro_batch_tokens,
        vocab_size=read_hf_config(settings.model_path).vocab_size,
    )
    shard = shard_batch(batch, ranks=layout.data, steps=1)[
        layout.coordinates(settings.rank).data
    ]
    seconds: list[float] = []
    metrics: dict[str, float] = {}
    for _ in range(settings.repetitions + 1):
        started = time.monotonic()
        metrics = resolve(rank.train(shard).metrics, "")
        seconds.append(time.monotonic() - started)
    return {
        "seconds": seconds[1:],
        "peak_memory_gb": metrics["peak_memory_gb"],
        "largest_micro_batch": int(metrics["largest_micro_batch"]),
        "row_tokens": sum(len(sample.tokens_T) for sample in batch.samples),
    }


def _port(settings: LayoutSettings) -> int:
    """That of the first rank, once it is open."""
    deadline = time.monotonic() + settings.deadline_s
    while not Path(settings.port_file).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the first rank did not open its port within {settings.deadline_s} s"
            )
        time.sleep(0.05)
    return int(Path(settings.port_file).read_text(encoding="utf-8"))


if __name__ == "__main__":
    layout_settings = TypeAdapter(LayoutSettings).validate_json(sys.stdin.read())
    torch.set_num_threads(layout_settings.threads)
    Path(layout_settings.out).write_text(
        json.dumps(measure(layout_settings)), encoding="utf-8"
    )
