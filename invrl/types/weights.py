"""A version of the weights, one exported weight, and what an update of an engine's
weights did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

WeightVersion = NewType("WeightVersion", int)
"""Number of batches that the weights were trained on, which is the step; 0 is the
initial model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """An exported weight: its Hugging Face name, its shape, and torch's name of its
    dtype ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Result of one committed weight update. Gaps are in nats."""

    version: WeightVersion
    num_bytes: int
    seconds: Mapping[str, float]
    """Seconds per phase: stage, prepare, pause, load, commit, resume, canary; summed
    over the engines in a rolling update. `joining_engines` is the wait for engines that
    come back, `trainer_canary` the trainer's part of the canary, which it computes
    beside the engines' part, `paused` the longest time during which an engine did not
    generate."""
    canary_max_gap: float
    canary_mean_gap: float
    lost_engines: Mapping[str, str] = field(default_factory=dict)
    """Name -> reason of engines that failed while others did not. They must leave the
    fleet."""
