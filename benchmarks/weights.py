"""usage: python -m benchmarks.weights --model-path MODEL [flags]

Measures updates of one engine's weights on this machine, beside a copy of as many
bytes, in turns: the loader alone, without SGLang; the same by a broadcast, beside a
plain broadcast of gloo; an idle engine; 8 and 64 requests in flight. Last, the loader
alone with the shapes of a Llama of 1.24 billion parameters, if there are 11 GB of
memory for it.

Prints each ratio, and writes it with its details to RESULTS/weights.json, as soon as it
is measured. Adds all of them to RESULTS/history.jsonl. A part that fails costs none of
the others. Exit code 1 if a part failed, or if a ratio is worse than the median of the
history by 25 %: ratios are of wall time.

--engine.dtype D                bfloat16 (default) or float32
--weights.arena-mode copy|alias as in a run (default: copy)
--device cpu|cuda               where the weights are (default: cpu). cuda: in one GPU, for trainer
                                and loader, by CUDA IPC; only with --no-engine
--updates N                     with 8 requests in flight (default: 100)
--repetitions N                 updates of every other part (default: 5)
--no-engine                     the loader alone: two processes, no SGLang
--no-1b                         without the Llama of 1.24 billion parameters
--deadline-s S                  of each phase of an update, each wait for tokens (default: 300)
--results FOLDER                default: bench
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.command_line import model_folder, run_benchmark, validated
from benchmarks.ratio_record import RatioRecord
from benchmarks.ratios import exceeded, rises
from benchmarks.weight_updates.weight_settings import (
    GPU_WEIGHT_TARGETS,
    WEIGHT_TARGETS,
    WeightBenchSettings,
)
from invrl.cli.arguments import split_options, unknown_flag
from invrl.engines.launch.engine_server import count_gpus
from invrl.errors import ConfigError
from invrl.run.loop.weight_updater import canary_prompts

_DEFAULTS = {
    "--model-path": "",
    "--engine.dtype": "bfloat16",
    "--weights.arena-mode": "copy",
    "--device": "cpu",
    "--updates": "100",
    "--repetitions": "5",
    "--deadline-s": "300",
    "--results": "bench",
}
_WITHOUT_ENGINE = "--no-engine"
_WITHOUT_1B = "--no-1b"
_SWITCHES = (_WITHOUT_ENGINE, _WITHOUT_1B)


def benchmark_weights(arguments: Sequence[str]) -> None:
    """Raises ConfigError; CommandFailed if a part failed or a ratio rose."""
    given, switches = split_options(arguments, list(_DEFAULTS))
    for switch in switches:
        if switch not in _SWITCHES:
            raise unknown_flag(switch, [*_DEFAULTS, *_SWITCHES])
    options = _DEFAULTS | given
    folder = model_folder(options)
    fields = {
        "model_path": str(folder),
        "engine_dtype": options["--engine.dtype"],
        "weight_arena": options["--weights.arena-mode"],
        "device": options["--device"],
        "updates": options["--updates"],
        "repetitions": options["--repetitions"],
        "with_engine": _WITHOUT_ENGINE not in switches,
        "with_1b": _WITHOUT_1B not in switches,
        "canary_prompts": canary_prompts(folder),
        "deadline_s": options["--deadline-s"],
    }
    settings = validated(WeightBenchSettings, fields, name="weights")
    _check_device(settings)
    reported = asdict(settings)
    del reported["canary_prompts"]
    record = RatioRecord(
        Path(options["--results"]).expanduser(),
        "weights",
        model=_model_in_history(folder.name, settings),
        settings=reported,
        targets=WEIGHT_TARGETS if settings.device == "cpu" else GPU_WEIGHT_TARGETS,
        missed=exceeded,
    )
    # It loads torch: bad input is answered without it.
    from benchmarks.weight_updates.measurement import measure_weights

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


if __name__ == "__main__":
    sys.exit(run_benchmark(benchmark_weights, usage=__doc__))
