"""The arena in the card's memory: the trainer's tensors are here, and the weight loader
alone, in another process, opens the arena by CUDA IPC."""

import asyncio

from benchmarks.ratios import Part
from benchmarks.weight_updates.measurement import measure_weights
from benchmarks.weight_updates.weight_settings import WeightBenchSettings
from gpu_check.random_model import random_model
from gpu_check.result import emit
from gpu_check.settings import CheckSettings

_DEADLINE_S = 60.0


def run(settings: CheckSettings) -> None:
    bench = WeightBenchSettings(
        model_path=str(random_model(settings, settings.model)),
        engine_dtype="bfloat16",
        device=settings.device,
        weight_arena="copy",
        updates=10,
        repetitions=5,
        with_engine=False,
        with_1b=not settings.smoke,
        canary_prompts=(),
        deadline_s=_DEADLINE_S,
    )
    failures: list[str] = []

    def report(part: Part) -> None:
        emit(ratios=part.ratios, failure=part.failure, **part.details)
        if part.failure:
            failures.append(part.failure)

    asyncio.run(measure_weights(bench, report))
    assert not failures, "; ".join(failures)
