"""What `python -m benchmarks.weights` measures, and what its ratios should be. Imports
no torch."""

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

IN_FLIGHT_MODE = "in_place"
"""What happens to requests in flight: they keep their keys and values
(`weights.inflight`)."""
FEW_REQUESTS = 8
MANY_REQUESTS = 64
BROADCAST = "broadcast"
"""The ratio of the weight transport `collective` to a plain gloo broadcast."""
WEIGHT_TARGETS = {
    "engine_idle": 3.0,
    f"gap_{FEW_REQUESTS}_{IN_FLIGHT_MODE}": 1.5,
    f"gap_{MANY_REQUESTS}_{IN_FLIGHT_MODE}": 1.5,
    f"failed_requests_{FEW_REQUESTS}": 0.0,
    f"failed_requests_{MANY_REQUESTS}": 0.0,
    f"unequal_tensors_{FEW_REQUESTS}": 0.0,
    f"unequal_tensors_{MANY_REQUESTS}": 0.0,
    BROADCAST: 1.3,
}
"""Ratio -> the most it should be. The ratios of the loader alone are on record only."""
GPU_WEIGHT_TARGETS = {
    "loader_stage_and_load": 20.0,
    "loader_memory_growth": 0.1,
    "loader_1b_stage_and_load": 20.0,
    "loader_1b_memory_growth": 0.1,
}
"""Likewise, for the loader alone on a GPU: the time of staging and loading, over a copy
of the same bytes within the GPU, and by how much the GPU's memory in use grows in all
updates, over those bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBenchSettings:
    model_path: str
    engine_dtype: Literal["bfloat16", "float32"]
    device: Literal["cpu", "cuda"]
    """Where trainer, arena and engine have the weights."""
    weight_arena: Literal["copy", "alias"]
    """Whether the engine copies a slot of the arena, or computes with it."""
    updates: PositiveInt
    """With few requests in flight."""
    repetitions: PositiveInt
    """Updates of every other part."""
    with_engine: bool
    with_1b: bool
    canary_prompts: tuple[tuple[int, ...], ...]
    deadline_s: PositiveFloat
    """Of each phase of an update, and of each wait for tokens."""
