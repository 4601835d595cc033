"""Settings of the weight transaction (`weight_sync.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from invrl.section import Section


class WeightSyncConfig(Section):
    """How new weights reach the engines, and what proves that they are there."""

    weight_carrier: Literal["arena", "bucket"] = Field(
        "arena", description="'arena': shared memory on one machine; 'bucket': SGLang's flattened buckets"
    )
    canary_max_gap: NonNegativeFloat = Field(0.0, description="engine to trainer, nats; 0: by dtype")
    canary_mean_gap: NonNegativeFloat = Field(0.0, description="the same on average; 0: by dtype")
    weight_sync_timeout_s: PositiveFloat = Field(
        300.0, description="deadline of each phase of an update; pause, commit and resume have 60 s at most"
    )
