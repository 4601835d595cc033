"""`invrl bench train`: measures the trainer on this machine."""

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from invrl import __version__
from invrl.bench.ratios import Entry, append_history, falls, missed, read_history
from invrl.bench.trainer import GPU_TARGETS, TARGETS, BenchSettings, measure_trainer
from invrl.cli.arguments import read_options
from invrl.cli.command import CommandFailed
from invrl.engines.engine_server import count_gpus
from invrl.errors import ConfigError
from invrl.host.disk import write_atomically
from invrl.model_folder import check_is_folder, check_model_folder
from invrl.run.config import ModelConfig
from invrl.run.driver_commands import FAILURE_EXIT
from invrl.train.families.registry import FAMILIES

_DEFAULTS = {
    "--model-path": "",
    "--train-dtype": "bfloat16",
    "--tokens": "2048",
    "--max-tokens-per-microbatch": "1024",
    "--repetitions": "3",
    "--cores": "",
    "--deadline-s": "3600",
    "--results": "bench",
}


def bench(arguments: Sequence[str]) -> None:
    """usage: invrl bench train --model-path MODEL [flags]

    Measures the trainer beside a plain Hugging Face step on the same rows, in turns, and two ranks
    beside one process with the same cores. Prints each ratio and writes it with its details to
    RESULTS/train.json as soon as it is measured, and adds all of them to RESULTS/history.jsonl.
    A part that fails costs none of the others. Two ranks that cannot divide the model's heads are
    measured on a model like it with random weights and other heads. Exit code 1 if a part failed,
    or if a ratio fell by more than 10 % below the median of the history.

    --train-dtype D                 bfloat16 (default) or float32
    --tokens N                      row tokens of a step (default: 2048)
    --max-tokens-per-microbatch N   default: 1024
    --repetitions N                 of each pair (default: 3)
    --cores N                       for the layouts: 2 ranks share them (default: those of this process,
                                    at most 2; 1: no layouts are measured)
    --deadline-s S                  of each process that is started (default: 3600)
    --results FOLDER                default: bench"""
    if not arguments or arguments[0] != "train":
        what = arguments[0] if arguments else ""
        fix = (
            "write `invrl bench train`; from a source checkout, `python tests/run_bench.py loop` or gateway "
            "measures the rest"
        )
        raise ConfigError("bench", what, "it measures the trainer only", fix)
    options = _DEFAULTS | read_options(arguments[1:], list(_DEFAULTS))
    settings = _settings(options)
    results = Path(options["--results"]).expanduser()
    results.mkdir(parents=True, exist_ok=True)
    targets = TARGETS | (GPU_TARGETS if count_gpus() else {})
    ratios: dict[str, float] = {}
    now = Entry(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=__version__,
        machine=_machine(),
        model=f"{Path(settings.model_path).name} {settings.train.train_dtype}",
        ratios=ratios,
    )
    result: dict[str, Any] = {
        "date": now.date,
        "version": now.commit,
        "machine": now.machine,
        "model": now.model,
        "tokens": settings.num_tokens,
        "max_tokens_per_microbatch": settings.train.max_tokens_per_microbatch,
        "repetitions": settings.repetitions,
        "ratios": ratios,
        "targets": targets,
        "fell": [],
    }
    has_failed = False
    for part in measure_trainer(settings):
        for name, ratio in part.ratios.items():
            ratios[name] = round(ratio, 4)
            print(_line(name, ratio, targets), flush=True)
        if part.failure:
            has_failed = True
            print(f"FAILED: {part.failure}", flush=True)
        result.update(part.details)
        result["missed"] = missed(ratios, targets)
        _write(results, result)
    result["fell"] = [str(fall) for fall in falls(now, read_history(results / "history.jsonl"))]
    append_history(results / "history.jsonl", now)
    _write(results, result)
    print(results / "train.json")
    for fall in result["fell"]:
        print(f"FELL: {fall}")
    if result["fell"] or has_failed:
        raise CommandFailed(FAILURE_EXIT)


def _write(results: Path, result: dict[str, Any]) -> None:
    write_atomically(results / "train.json", json.dumps(result, indent=2) + "\n")


def _line(name: str, ratio: float, targets: dict[str, float]) -> str:
    if name not in targets:
        return f"{name:<26}{ratio:7.3f}"
    verdict = "  MISSED" if ratio < targets[name] else ""
    return f"{name:<26}{ratio:7.3f}   target {targets[name]:.2f}{verdict}"


def _settings(options: dict[str, str]) -> BenchSettings:
    if not options["--model-path"]:
        raise ConfigError("--model-path", "", "it is missing", "give a model folder")
    folder = ModelConfig(model_path=options["--model-path"]).folder
    check_is_folder("--model-path", options["--model-path"], folder)
    check_model_folder(folder, families=FAMILIES)
    cores = options["--cores"] or str(min(2, len(os.sched_getaffinity(0))))
    fields = {
        "model_path": str(folder),
        "num_tokens": options["--tokens"],
        "repetitions": options["--repetitions"],
        "cores": cores,
        "deadline_s": options["--deadline-s"],
        "train": {
            "train_dtype": options["--train-dtype"],
            "max_tokens_per_microbatch": options["--max-tokens-per-microbatch"],
        },
    }
    try:
        return TypeAdapter(BenchSettings).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"bench {field}", first["input"], first["msg"], "see `invrl bench --help`"
        ) from error


def _machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    gpus = count_gpus()
    if gpus:
        return f"{gpus} GPUs, {os.cpu_count()} x {processor}"
    return f"{os.cpu_count()} x {processor}"
