"""usage: python -m benchmarks.train --model-path MODEL [flags]

Measures the trainer on this machine: beside a plain Hugging Face step on the same rows,
in turns, and two ranks beside one process with the same cores. Two ranks that cannot
divide the model's heads are measured on a model like it with random weights and other
heads.

Prints each ratio, and writes it with its details to RESULTS/train.json, as soon as it
is measured. Adds all of them to RESULTS/history.jsonl. A part that fails costs none of
the others. Exit code 1 if a part failed, or if a ratio is worse than the median of the
history by 10 %.

--train-dtype D                 bfloat16 (default) or float32
--tokens N                      row tokens of a step (default: 2048)
--max-tokens-per-micro-batch N   default: 1024
--repetitions N                 of each pair (default: 3)
--cores N                       for the layouts: 2 ranks share them (default: those of this
                                process, at most 2; 1: no layouts are measured)
--deadline-s S                  of each process that is started (default: 3600)
--results FOLDER                default: bench
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import model_folder, run_benchmark, validated
from benchmarks.ratio_record import RatioRecord
from benchmarks.ratios import falls, missed
from benchmarks.training.trainer import (
    GPU_TARGETS,
    TARGETS,
    BenchSettings,
    measure_trainer,
)
from invrl.cli.arguments import read_options
from invrl.engines.launch.engine_server import count_gpus

_DEFAULTS = {
    "--model-path": "",
    "--train-dtype": "bfloat16",
    "--tokens": "2048",
    "--max-tokens-per-micro-batch": "1024",
    "--repetitions": "3",
    "--cores": "",
    "--deadline-s": "3600",
    "--results": "bench",
}


def benchmark_training(arguments: Sequence[str]) -> None:
    """Raises ConfigError; CommandFailed if a part failed or a ratio fell."""
    options = _DEFAULTS | read_options(arguments, list(_DEFAULTS))
    fields = {
        "model_path": str(model_folder(options)),
        "num_tokens": options["--tokens"],
        "repetitions": options["--repetitions"],
        "cores": options["--cores"] or str(min(2, len(os.sched_getaffinity(0)))),
        "deadline_s": options["--deadline-s"],
        "train": {
            "train_dtype": options["--train-dtype"],
            "max_tokens_per_micro_batch": options["--max-tokens-per-micro-batch"],
        },
    }
    settings = validated(BenchSettings, fields, name="train")
    record = RatioRecord(
        Path(options["--results"]).expanduser(),
        "train",
        model=f"{Path(settings.model_path).name} {settings.train.train_dtype}",
        settings={
            "tokens": settings.num_tokens,
            "max_tokens_per_micro_batch": settings.train.micro_batch_tokens,
            "repetitions": settings.repetitions,
        },
        targets=TARGETS | (GPU_TARGETS if count_gpus() else {}),
        missed=missed,
    )
    for part in measure_trainer(settings):
        record.add(part)
    record.close("fell", falls)


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark_training, usage=__doc__))
