"""`invrl bench`: measures the trainer, or the updates of an engine's weights, on this
machine."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from invrl.bench.ratios import exceeded, falls, missed, rises
from invrl.bench.trainer import GPU_TARGETS, TARGETS, BenchSettings, measure_trainer
from invrl.bench.weight_settings import (
    GPU_WEIGHT_TARGETS,
    WEIGHT_TARGETS,
    WeightBenchSettings,
)
from invrl.cli.arguments import read_options, split_options, unknown_flag
from invrl.cli.bench_record import BenchRecord
from invrl.engines.engine_server import count_gpus
from invrl.errors import ConfigError
from invrl.model_folder import check_is_folder, check_model_folder
from invrl.run.config import ModelConfig
from invrl.run.weight_updater import canary_prompts
from invrl.train.families.registry import FAMILIES

Settings = TypeVar("Settings")

_TRAIN_DEFAULTS = {
    "--model-path": "",
    "--train-dtype": "bfloat16",
    "--tokens": "2048",
    "--max-tokens-per-microbatch": "1024",
    "--repetitions": "3",
    "--cores": "",
    "--deadline-s": "3600",
    "--results": "bench",
}
_WEIGHTS_DEFAULTS = {
    "--model-path": "",
    "--engine-dtype": "bfloat16",
    "--weight-arena": "copy",
    "--device": "cpu",
    "--updates": "100",
    "--repetitions": "5",
    "--deadline-s": "300",
    "--results": "bench",
}
_WITHOUT_ENGINE = "--no-engine"
_WITHOUT_1B = "--no-1b"
_WEIGHTS_SWITCHES = (_WITHOUT_ENGINE, _WITHOUT_1B)


def bench(arguments: Sequence[str]) -> None:
    """usage: invrl bench train --model-path MODEL [flags]
           invrl bench weights --model-path MODEL [flags]

    Prints each ratio, and writes it with its details to RESULTS/train.json or
    weights.json, as soon as it is measured. Adds all of them to RESULTS/history.jsonl.
    A part that fails costs none of the others. Exit code 1 if a part failed, or if a
    ratio is worse than the median of the history: by 10 % for train, by 25 % for
    weights, where ratios are of wall time.

    train: the trainer beside a plain Hugging Face step on the same rows, in turns, and
    two ranks beside one process with the same cores. Two ranks that cannot divide the
    model's heads are measured on a model like it with random weights and other heads.

    --train-dtype D                 bfloat16 (default) or float32
    --tokens N                      row tokens of a step (default: 2048)
    --max-tokens-per-microbatch N   default: 1024
    --repetitions N                 of each pair (default: 3)
    --cores N                       for the layouts: 2 ranks share them (default: those of this
                                    process, at most 2; 1: no layouts are measured)
    --deadline-s S                  of each process that is started (default: 3600)
    --results FOLDER                default: bench

    weights: updates of one engine's weights beside a copy of as many bytes, in turns:
    the loader alone, without SGLang; the same by a broadcast, beside a plain broadcast
    of gloo; an idle engine; 8 and 64 requests in flight. Last, the loader alone with
    the shapes of a Llama of 1.24 billion parameters, if there are 11 GB of memory for
    it.

    --engine-dtype D                bfloat16 (default) or float32
    --weight-arena copy|alias       as in a run (default: copy)
    --device cpu|cuda               where the weights are (default: cpu). cuda: in one GPU, for trainer
                                    and loader, by CUDA IPC; only with --no-engine
    --updates N                     with 8 requests in flight (default: 100)
    --repetitions N                 updates of every other part (default: 5)
    --no-engine                     the loader alone: two processes, no SGLang
    --no-1b                         without the Llama of 1.24 billion parameters
    --deadline-s S                  of each phase of an update, each wait for tokens (default: 300)
    --results FOLDER                default: bench"""
    measurements = {"train": _bench_train, "weights": _bench_weights}
    name = arguments[0] if arguments else ""
    if name not in measurements:
        fix = (
            "write `invrl bench train` or `invrl bench weights`; from a source checkout, "
            "`python tests/run_bench.py loop` or gateway measures the rest"
        )
        raise ConfigError("bench", name, "it measures train or weights", fix)
    measurements[name](arguments[1:])


def _bench_train(arguments: Sequence[str]) -> None:
    options = _TRAIN_DEFAULTS | read_options(arguments, list(_TRAIN_DEFAULTS))
    fields = {
        "model_path": str(_model_folder(options)),
        "num_tokens": options["--tokens"],
        "repetitions": options["--repetitions"],
        "cores": options["--cores"] or str(min(2, len(os.sched_getaffinity(0)))),
        "deadline_s": options["--deadline-s"],
        "train": {
            "train_dtype": options["--train-dtype"],
            "max_tokens_per_microbatch": options["--max-tokens-per-microbatch"],
        },
    }
    settings = _validate(BenchSettings, fields)
    record = BenchRecord(
        Path(options["--results"]).expanduser(),
        "train",
        model=f"{Path(settings.model_path).name} {settings.train.train_dtype}",
        settings={
            "tokens": settings.num_tokens,
            "max_tokens_per_microbatch": settings.train.max_tokens_per_microbatch,
            "repetitions": settings.repetitions,
        },
        targets=TARGETS | (GPU_TARGETS if count_gpus() else {}),
        missed=missed,
    )
    for part in measure_trainer(settings):
        record.add(part)
    record.close("fell", falls)


def _bench_weights(arguments: Sequence[str]) -> None:
    given, switches = split_options(arguments, list(_WEIGHTS_DEFAULTS))
    for switch in switches:
        if switch not in _WEIGHTS_SWITCHES:
            raise unknown_flag(switch, [*_WEIGHTS_DEFAULTS, *_WEIGHTS_SWITCHES])
    options = _WEIGHTS_DEFAULTS | given
    folder = _model_folder(options)
    fields = {
        "model_path": str(folder),
        "engine_dtype": options["--engine-dtype"],
        "weight_arena": options["--weight-arena"],
        "device": options["--device"],
        "updates": options["--updates"],
        "repetitions": options["--repetitions"],
        "with_engine": _WITHOUT_ENGINE not in switches,
        "with_1b": _WITHOUT_1B not in switches,
        "canary_prompts": canary_prompts(folder),
        "deadline_s": options["--deadline-s"],
    }
    settings = _validate(WeightBenchSettings, fields)
    _check_device(settings)
    reported = asdict(settings)
    del reported["canary_prompts"]
    record = BenchRecord(
        Path(options["--results"]).expanduser(),
        "weights",
        model=_model_in_history(folder.name, settings),
        settings=reported,
        targets=WEIGHT_TARGETS if settings.device == "cpu" else GPU_WEIGHT_TARGETS,
        missed=exceeded,
    )
    from invrl.bench.weights import (
        measure_weights,
    )  # loads torch: bad input is answered without it

    asyncio.run(measure_weights(settings, record.add))
    record.close("rose", rises)


def _model_in_history(name: str, settings: WeightBenchSettings) -> str:
    """Ratios are compared with those of the same dtype and way into the engine."""
    words = [name, settings.engine_dtype]
    if settings.weight_arena != "copy":
        words.append(settings.weight_arena)
    if settings.device != "cpu":
        words.append(settings.device)
    return " ".join(words)


def _check_device(settings: WeightBenchSettings) -> None:
    """Raises ConfigError."""
    if settings.device == "cpu":
        return
    if settings.with_engine:
        reason = "an engine beside a trainer on one GPU is not measured"
        raise ConfigError("--device", settings.device, reason, f"add {_WITHOUT_ENGINE}")
    if count_gpus() == 0:
        raise ConfigError(
            "--device",
            settings.device,
            "the installed torch sees no GPU",
            "leave it out",
        )


def _model_folder(options: Mapping[str, str]) -> Path:
    """Raises ConfigError unless --model-path is a folder with a model that is
    supported."""
    if not options["--model-path"]:
        raise ConfigError("--model-path", "", "it is missing", "give a model folder")
    folder = ModelConfig(model_path=options["--model-path"]).folder
    check_is_folder("--model-path", options["--model-path"], folder)
    check_model_folder(folder, families=FAMILIES)
    return folder


def _validate(settings: type[Settings], fields: Mapping[str, Any]) -> Settings:
    try:
        return TypeAdapter(settings).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"bench {field}", first["input"], first["msg"], "see `invrl bench --help`"
        ) from error
